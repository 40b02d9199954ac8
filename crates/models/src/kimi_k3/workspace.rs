//! The activations of a pass, taken once for the largest pass, and what they and a sequence's state cost.

use crate::source::EXPERTS_TOGETHER;
use checkpoint::K3Config;
use kernels::{Backend, KdaState, KvFormat, Latents};

/// Rows whose logits are computed together; K3's vocabulary makes a row of logits 655 KB.
pub const LOGIT_ROWS: usize = 32;

/// Activations for passes of up to a fixed number of rows.
pub struct Workspace<A> {
    pub(super) stream: A,
    pub(super) bank: Vec<A>,
    pub(super) mixed: A,
    pub(super) x: A,
    pub(super) out: A,
    pub(super) kda: KdaWork<A>,
    pub(super) mla: MlaWork<A>,
    pub(super) dense: [A; 2],
    pub(super) moe: MoeWork<A>,
    pub(super) last: A,
    pub(super) logits: A,
}

pub(super) struct KdaWork<A> {
    pub(super) q: A,
    pub(super) k: A,
    pub(super) v: A,
    pub(super) gate: A,
    pub(super) f_a: A,
    pub(super) alpha: A,
    pub(super) beta: A,
    pub(super) o: A,
}

pub(super) struct MlaWork<A> {
    pub(super) q_a: A,
    pub(super) q_a_normed: A,
    pub(super) q: A,
    pub(super) kv: A,
    pub(super) absorbed: A,
    pub(super) latent: A,
    pub(super) o: A,
    pub(super) gate: A,
}

pub(super) struct MoeWork<A> {
    pub(super) scores: A,
    pub(super) z: A,
    pub(super) shared: [A; 2],
    pub(super) results: A,
    pub(super) y: A,
}

impl<A> Workspace<A> {
    /// Room for passes of up to `rows` rows.
    pub fn new(be: &impl Backend<Act = A>, c: &K3Config, rows: usize) -> Self {
        Self::build(c, rows, |rows, width| be.act(rows, width))
    }

    /// Names every activation once, so that taking them and sizing them cannot differ.
    fn build(c: &K3Config, rows: usize, mut take: impl FnMut(usize, usize) -> A) -> Self {
        let (h, heads) = (c.hidden_size, c.num_attention_heads);
        let l = &c.linear_attn_config;
        let p = l.num_heads * l.head_dim;
        let latent = c.routed_expert_hidden_size;
        let shared = c.moe_intermediate_size * c.num_shared_experts;
        let last = rows.min(LOGIT_ROWS);
        let mut act = |width| take(rows, width);
        Self {
            stream: act(h),
            bank: (0..blocks(c)).map(|_| act(h)).collect(),
            mixed: act(h),
            x: act(h),
            out: act(h),
            kda: KdaWork {
                q: act(p),
                k: act(p),
                v: act(p),
                gate: act(p),
                f_a: act(l.head_dim),
                alpha: act(p),
                beta: act(l.num_heads),
                o: act(p),
            },
            mla: MlaWork {
                q_a: act(c.q_lora_rank),
                q_a_normed: act(c.q_lora_rank),
                q: act(heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)),
                kv: act(c.kv_lora_rank + c.qk_rope_head_dim),
                absorbed: act(heads * (c.kv_lora_rank + c.qk_rope_head_dim)),
                latent: act(heads * c.kv_lora_rank),
                o: act(heads * c.v_head_dim),
                gate: act(heads * c.v_head_dim),
            },
            dense: [act(c.intermediate_size), act(c.intermediate_size)],
            moe: MoeWork {
                scores: act(c.num_experts),
                z: act(latent),
                shared: [act(shared), act(shared)],
                results: take(rows * c.num_experts_per_token, latent),
                y: take(rows, latent),
            },
            last: take(last, h),
            logits: take(last, c.vocab_size),
        }
    }
}

impl Workspace<()> {
    /// Bytes of a workspace for `rows` rows.
    pub fn bytes(c: &K3Config, rows: usize) -> u64 {
        let mut bytes = 0;
        Workspace::build(c, rows, |rows, width| bytes += (rows * width * 4) as u64);
        bytes
    }

    /// Most bytes that operations on `rows` rows take besides the workspace while they run: a rearranged copy of the widest
    /// input, an expert's inner activations, and partial sums for each thread.
    pub fn scratch_bytes(c: &K3Config, rows: usize, threads: usize) -> u64 {
        const PANEL_BYTES: usize = 16 << 10;
        const PARTIAL_SUM_BYTES_A_ROW: usize = 8 * 64 * 2;
        let p = c.linear_attn_config.num_heads * c.linear_attn_config.head_dim;
        let o = c.num_attention_heads * c.v_head_dim;
        let widest = c.intermediate_size.max(p).max(o).max(c.hidden_size) + kernels::BLOCK;
        let expert = 3 * c.moe_intermediate_size.max(c.routed_expert_hidden_size);
        // Of experts with few rows several are under way, and what a thread took it keeps.
        let at_once = if threads > 1 { threads + EXPERTS_TOGETHER } else { 0 };
        let few = at_once * rows.min(kernels::ROWS_OF_A_THREAD) * expert;
        ((rows * (widest + expert) + few) * 4
            + threads * (PANEL_BYTES + rows.next_multiple_of(8) * PARTIAL_SUM_BYTES_A_ROW)) as u64
    }
}

/// Entries of the bank of finished block sums.
fn blocks(c: &K3Config) -> usize {
    c.num_hidden_layers.div_ceil(c.attn_res_block_size)
}

/// Bytes of one sequence's state: the part that does not grow, and the latents of `positions` positions, stored as `kv`.
pub fn state_bytes(c: &K3Config, positions: usize, kv: KvFormat) -> u64 {
    let l = &c.linear_attn_config;
    (0..c.num_hidden_layers)
        .map(|layer| match c.is_mla(layer) {
            true => Latents::bytes(c.kv_lora_rank + c.qk_rope_head_dim, positions, kv),
            false => KdaState::bytes(l.num_heads, l.head_dim, l.short_conv_kernel_size),
        })
        .sum()
}

/// Bytes that a token of context adds to a sequence's state, whole pages apart.
pub fn token_bytes(c: &K3Config, kv: KvFormat) -> u64 {
    let layers = (0..c.num_hidden_layers).filter(|&layer| c.is_mla(layer)).count();
    (layers * (c.kv_lora_rank + c.qk_rope_head_dim) * kv.bytes()) as u64
}

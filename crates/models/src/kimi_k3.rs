//! Kimi K3, the text model, in the order of its forward pass. Shapes are `[rows, width]`; `H` is `hidden_size`.
//!
//! What happens to one row: the stream is the running sum of sublayer outputs since the last block boundary, the bank the
//! finished sums of earlier blocks (the first is the embedding). Each sublayer sees neither, but the attention residual:
//! a softmax mix of bank and stream, then a norm.
//!
//! MLA runs in the absorbed form, on the cached latents: per context token and layer `heads * (2 latent + shared)` multiply-adds
//! instead of `heads * (nope + shared + value)`, 3.4 times as many at K3's widths, but 576 numbers of cache instead of
//! 96 * 320, some 50 times less memory. KDA is always the recurrence: a chunked form would give a token other bits in other
//! company.

use crate::source::{ExpertStream, TensorSource};
use checkpoint::K3Config;
use kernels::{Backend, ExpertWork, KvFormat, MlaShape, Routes, SituCaps, Span};

/// Added to the sum of squares of a KDA query or key before the root.
const L2_EPS: f32 = 1e-6;

/// The default epsilon of the two norms inside MLA: the release builds them without one, so its class default applies.
pub const DEFAULT_MLA_EPS: f32 = 1e-6;

/// The resident part of Kimi K3. Fields bear the checkpoint's tensor names.
pub struct KimiK3<B: Backend> {
    config: K3Config,
    mla_eps: f32,
    layers: Vec<Layer<B>>,
    output_attn_res: B::Vector, // [H]
    norm: B::Vector,            // [H]
    lm_head: B::Linear,         // [vocab, H]
}

struct Layer<B: Backend> {
    self_attention_res: B::Vector,       // [H]: norm * proj
    input_layernorm: B::Vector,          // [H]
    self_attn: Attention<B>,             //
    mlp_res: B::Vector,                  // [H]: norm * proj
    post_attention_layernorm: B::Vector, // [H]
    ffn: FeedForward<B>,
}

enum Attention<B: Backend> {
    Kda(Box<Kda<B>>),
    Mla(Box<Mla<B>>),
}

enum FeedForward<B: Backend> {
    Dense(Glu<B>),
    Moe(Box<Moe<B>>),
}

/// Kimi Delta Attention; `P = heads * dim`.
struct Kda<B: Backend> {
    q_proj: B::Linear,      // [P, H]
    k_proj: B::Linear,      // [P, H]
    v_proj: B::Linear,      // [P, H]
    conv1d: [B::Vector; 3], // [taps, P] for q, k, v
    f_a_proj: B::Linear,    // [dim, H]
    f_b_proj: B::Linear,    // [P, dim]
    dt_bias: B::Vector,     // [P]
    rate: B::Vector,        // [heads]: exp(A_log)
    b_proj: B::Linear,      // [heads, H]
    o_norm: B::Vector,      // [dim]
    g_proj: B::Linear,      // [P, H]
    o_proj: B::Linear,      // [H, P]
}

/// Multi-head latent attention with output gate, without positions.
struct Mla<B: Backend> {
    q_a_proj: B::Linear,           // [q_lora, H]
    q_a_layernorm: B::Vector,      // [q_lora]
    q_b_proj: B::Linear,           // [heads * (nope + shared), q_lora]
    kv_a_proj_with_mqa: B::Linear, // [latent + shared, H]
    kv_a_layernorm: B::Vector,     // [latent]
    kv_b_proj: B::Linear,          // [heads * (nope + value), latent]
    g_proj: B::Linear,             // [heads * value, H]
    o_proj: B::Linear,             // [H, heads * value]
}

/// A gated MLP with SiTU.
struct Glu<B: Backend> {
    gate_proj: B::Linear, // [inner, H]
    up_proj: B::Linear,   // [inner, H]
    down_proj: B::Linear, // [H, inner]
}

/// The latent mixture of experts; the routed experts themselves are streamed.
struct Moe<B: Backend> {
    gate: B::Linear,                    // [experts, H]
    e_score_correction_bias: B::Vector, // [experts]
    routed_expert_down_proj: B::Linear, // [latent, H]
    routed_expert_norm: B::Vector,      // [latent]
    routed_expert_up_proj: B::Linear,   // [H, latent]
    shared_experts: Glu<B>,
}

/// Consecutive rows of one sequence in a pass.
pub struct Segment<'a, B: Backend> {
    /// Where the sequence stands; advanced by the pass.
    pub state: &'a mut State<B>,
    /// Number of tokens, at least one.
    pub rows: usize,
}

/// What a pass works on.
pub struct Input<'a, 'b, B: Backend> {
    /// The rows' sequences, in row order.
    pub segments: &'a mut [Segment<'b, B>],
    /// The embedding of each row: little-endian bf16 `[rows, H]`.
    pub embeddings: &'a [u8],
    /// Rows whose logits are wanted.
    pub logits_of: &'a [usize],
}

impl<B: Backend> KimiK3<B> {
    /// Takes all resident tensors. `mla_eps` is the epsilon of the two norms inside MLA, see [`DEFAULT_MLA_EPS`].
    pub fn load<S: TensorSource>(be: &B, config: &K3Config, mla_eps: f32, source: &mut S) -> Result<Self, S::Error> {
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for layer in 0..config.num_hidden_layers {
            layers.push(Layer::load(be, config, layer, source)?);
        }
        let mut top = Loader {
            be,
            source,
            prefix: String::new(),
        };
        Ok(Self {
            config: config.clone(),
            mla_eps,
            layers,
            output_attn_res: top.residual("model.output_attn_res")?,
            norm: top.vector("model.norm.weight")?,
            lm_head: top.linear("lm_head")?,
        })
    }

    /// The model's dimensions.
    pub fn config(&self) -> &K3Config {
        &self.config
    }

    /// The state before the first token, whose latents will be stored as `kv`.
    pub fn new_state(&self, be: &B, kv: KvFormat) -> State<B> {
        let c = &self.config;
        let l = &c.linear_attn_config;
        let layers = self
            .layers
            .iter()
            .map(|layer| match layer.self_attn {
                Attention::Kda(_) => LayerState::Kda(be.kda(l.num_heads, l.head_dim, l.short_conv_kernel_size)),
                Attention::Mla(_) => LayerState::Mla(be.latents(c.kv_lora_rank + c.qk_rope_head_dim, kv)),
            })
            .collect();
        State { layers, positions: 0 }
    }

    /// Runs one pass over any number of rows and returns the logits of the rows asked for, `[logits_of, vocab]`.
    ///
    /// After an error the states of the segments are spoilt and must be dropped.
    pub fn forward<E: ExpertStream>(
        &self,
        be: &B,
        ws: &mut Workspace<B::Act>,
        input: Input<'_, '_, B>,
        experts: &mut E,
        mut probe: Option<&mut dyn Probe<B>>,
    ) -> Result<Vec<f32>, E::Error> {
        let c = &self.config;
        let eps = c.rms_norm_eps;
        let mut spans = Vec::with_capacity(input.segments.len());
        for segment in input.segments.iter() {
            let first = spans.last().map_or(0, |s: &Span| s.first + s.rows);
            spans.push(Span {
                first,
                rows: segment.rows,
            });
        }
        be.upload_bf16(input.embeddings, &mut ws.stream);
        let mut closed = 0;
        for (i, layer) in self.layers.iter().enumerate() {
            // The attention side mixes before the bank grows; at the very start there is nothing to mix.
            if closed == 0 {
                be.copy(&ws.stream, &mut ws.mixed);
            } else {
                mix(
                    be,
                    &ws.bank[..closed],
                    &ws.stream,
                    &layer.self_attention_res,
                    eps,
                    &mut ws.mixed,
                );
            }
            be.rms_norm(&ws.mixed, &layer.input_layernorm, eps, &mut ws.x);
            match &layer.self_attn {
                Attention::Kda(kda) => kda.forward(be, ws, c, i, &spans, input.segments),
                Attention::Mla(mla) => mla.forward(be, ws, c, self.mla_eps, i, &spans, input.segments),
            }
            if i % c.attn_res_block_size == 0 {
                be.copy(&ws.stream, &mut ws.bank[closed]);
                be.copy(&ws.out, &mut ws.stream);
                closed += 1;
            } else {
                be.add(&mut ws.stream, &ws.out);
            }
            layer.feed_forward_input(be, ws, closed, eps);
            let routes = match &layer.ffn {
                FeedForward::Dense(glu) => {
                    glu.forward(be, c, &ws.x, &mut ws.dense, &mut ws.out);
                    None
                }
                FeedForward::Moe(moe) => Some(moe.forward(be, ws, c, i, experts)?),
            };
            be.add(&mut ws.stream, &ws.out);
            if let Some(probe) = &mut probe {
                probe.layer(i, &ws.stream, routes.as_ref());
                let guesses = self.guess(be, ws, closed, i + 1, probe.guess_widths());
                if !guesses.is_empty() {
                    probe.guesses(i + 1, &guesses);
                }
            }
        }
        for segment in input.segments {
            segment.state.positions += segment.rows;
        }
        let mut logits = Vec::with_capacity(input.logits_of.len() * c.vocab_size);
        mix(
            be,
            &ws.bank[..closed],
            &ws.stream,
            &self.output_attn_res,
            eps,
            &mut ws.mixed,
        );
        be.rms_norm(&ws.mixed, &self.norm, eps, &mut ws.x);
        for rows in input.logits_of.chunks(LOGIT_ROWS) {
            be.gather(&ws.x, rows, &mut ws.last);
            be.matmul(&self.lm_head, &ws.last, &mut ws.logits);
            logits.extend(be.download(&ws.logits));
        }
        Ok(logits)
    }

    /// The routes that layer `next` would take if its attention added nothing, once for each width in experts a row. Nothing
    /// where `next` has no router. Takes `ws.stream` as the layer before left it and overwrites only what every layer
    /// writes before it reads.
    ///
    /// Inside a block the feed-forward part sees the bank and the stream, of which the stream still lacks the attention's share.
    /// Where `next` opens a block, the stream becomes the bank's last entry and attention begins a new sum. What is known are
    /// the same vectors, and the new sum is left out; taken as zero it would only shorten the mix, which the norm undoes.
    fn guess(&self, be: &B, ws: &mut Workspace<B::Act>, closed: usize, next: usize, widths: &[usize]) -> Vec<Routes> {
        let c = &self.config;
        let Some(layer) = self.layers.get(next).filter(|_| !widths.is_empty()) else {
            return vec![];
        };
        let FeedForward::Moe(moe) = &layer.ffn else {
            return vec![];
        };
        layer.feed_forward_input(be, ws, closed, c.rms_norm_eps);
        moe.score(be, &ws.x, &mut ws.moe.scores);
        let route = |&width: &usize| moe.route(be, c, &ws.moe.scores, width.min(c.num_experts));
        widths.iter().map(route).collect()
    }
}

impl<B: Backend> Layer<B> {
    /// `ws.x = norm(mix(bank, stream))`.
    fn feed_forward_input(&self, be: &B, ws: &mut Workspace<B::Act>, closed: usize, eps: f32) {
        mix(be, &ws.bank[..closed], &ws.stream, &self.mlp_res, eps, &mut ws.mixed);
        be.rms_norm(&ws.mixed, &self.post_attention_layernorm, eps, &mut ws.x);
    }
}

/// Attention residual over the closed blocks and the stream.
fn mix<B: Backend>(be: &B, bank: &[B::Act], stream: &B::Act, w: &B::Vector, eps: f32, out: &mut B::Act) {
    let sources: Vec<&B::Act> = bank.iter().chain([stream]).collect();
    be.mix(&sources, w, eps, out);
}

impl<B: Backend> Kda<B> {
    /// `ws.out = KDA(ws.x)`.
    fn forward(
        &self,
        be: &B,
        ws: &mut Workspace<B::Act>,
        c: &K3Config,
        layer: usize,
        spans: &[Span],
        segments: &mut [Segment<B>],
    ) {
        let l = &c.linear_attn_config;
        let mut states: Vec<&mut B::Kda> = segments
            .iter_mut()
            .map(|s| match &mut s.state.layers[layer] {
                LayerState::Kda(state) => state,
                LayerState::Mla(_) => unreachable!("a state has the layers of its model"),
            })
            .collect();
        let w = &mut ws.kda;
        be.matmuls(
            &[
                &self.q_proj,
                &self.k_proj,
                &self.v_proj,
                &self.g_proj,
                &self.f_a_proj,
                &self.b_proj,
            ],
            &ws.x,
            // The first four [rows, P], then [rows, dim] and [rows, heads].
            &mut [&mut w.q, &mut w.k, &mut w.v, &mut w.gate, &mut w.f_a, &mut w.beta],
        );
        be.conv(
            [&mut w.q, &mut w.k, &mut w.v],
            self.conv1d.each_ref(),
            spans,
            &mut states,
        );
        be.head_l2_norm(&mut w.q, l.head_dim, L2_EPS, 1.0 / (l.head_dim as f32).sqrt());
        be.head_l2_norm(&mut w.k, l.head_dim, L2_EPS, 1.0);
        be.matmul(&self.f_b_proj, &w.f_a, &mut w.alpha); // [rows, P]
        be.decay(&mut w.alpha, &self.dt_bias, &self.rate, l.gate_lower_bound);
        be.sigmoid(&mut w.beta);
        be.delta(&w.q, &w.k, &w.v, &w.alpha, &w.beta, spans, &mut states, &mut w.o);
        be.head_norm_gate(&w.o, &self.o_norm, c.rms_norm_eps, &w.gate, &mut w.q);
        be.matmul(&self.o_proj, &w.q, &mut ws.out); // [rows, H]
    }
}

impl<B: Backend> Mla<B> {
    /// `ws.out = MLA(ws.x)`.
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        be: &B,
        ws: &mut Workspace<B::Act>,
        c: &K3Config,
        eps: f32,
        layer: usize,
        spans: &[Span],
        segments: &mut [Segment<B>],
    ) {
        let mut caches: Vec<&mut B::Latents> = segments
            .iter_mut()
            .map(|s| match &mut s.state.layers[layer] {
                LayerState::Mla(cache) => cache,
                LayerState::Kda(_) => unreachable!("a state has the layers of its model"),
            })
            .collect();
        let shape = mla_shape(c);
        let w = &mut ws.mla;
        be.matmuls(
            &[&self.q_a_proj, &self.kv_a_proj_with_mqa, &self.g_proj],
            &ws.x,
            // [rows, q_lora], [rows, latent + shared], [rows, heads * value]
            &mut [&mut w.q_a, &mut w.kv, &mut w.gate],
        );
        be.rms_norm(&w.q_a, &self.q_a_layernorm, eps, &mut w.q_a_normed);
        be.matmul(&self.q_b_proj, &w.q_a_normed, &mut w.q); // [rows, heads * (nope + shared)]
        be.append_latents(&w.kv, &self.kv_a_layernorm, eps, spans, &mut caches);
        be.absorb_query(&self.kv_b_proj, &w.q, shape, &mut w.absorbed); // [rows, heads * (latent + shared)]
        let caches: Vec<&B::Latents> = caches.into_iter().map(|c| &*c).collect();
        let scale = 1.0 / ((shape.nope + shape.shared) as f32).sqrt();
        be.attend(&w.absorbed, shape, scale, spans, &caches, &mut w.latent); // [rows, heads * latent]
        be.expand_values(&self.kv_b_proj, &w.latent, shape, &mut w.o); // [rows, heads * value]
        be.gate(&mut w.o, &w.gate);
        be.matmul(&self.o_proj, &w.o, &mut ws.out); // [rows, H]
    }
}

impl<B: Backend> Glu<B> {
    /// `out = W_down SiTU(W_gate x, W_up x)`.
    fn forward(&self, be: &B, c: &K3Config, x: &B::Act, inner: &mut [B::Act; 2], out: &mut B::Act) {
        let [gate, up] = inner;
        be.matmuls(&[&self.gate_proj, &self.up_proj], x, &mut [gate, up]); // [rows, inner]
        self.finish(be, c, inner, out);
    }

    /// `out = W_down SiTU(inner)`.
    fn finish(&self, be: &B, c: &K3Config, [gate, up]: &mut [B::Act; 2], out: &mut B::Act) {
        be.situ(gate, up, situ_caps(c));
        be.matmul(&self.down_proj, gate, out); // [rows, H]
    }
}

impl<B: Backend> Moe<B> {
    /// `ws.out = MoE(ws.x)`.
    fn forward<E: ExpertStream>(
        &self,
        be: &B,
        ws: &mut Workspace<B::Act>,
        c: &K3Config,
        layer: usize,
        experts: &mut E,
    ) -> Result<Routes, E::Error> {
        let w = &mut ws.moe;
        self.score(be, &ws.x, &mut w.scores); // [rows, experts]
        let routes = self.route(be, c, &w.scores, c.num_experts_per_token);
        let demand = routes.demand();
        experts.demand(layer, demand.experts())?;
        let (shared, [gate, up]) = (&self.shared_experts, &mut w.shared);
        be.matmuls(
            &[&self.routed_expert_down_proj, &shared.gate_proj, &shared.up_proj],
            &ws.x,
            // [rows, latent], then [rows, inner]
            &mut [&mut w.z, gate, up],
        );
        shared.finish(be, c, &mut w.shared, &mut ws.out); // [rows, H]
        while experts.next(&mut |landed| {
            let work = landed.iter().map(|(expert, matrices)| ExpertWork {
                matrices: *matrices,
                takers: demand.takers(*expert),
            });
            let work: Vec<_> = work.collect();
            be.experts(&work, situ_caps(c), &w.z, &mut w.results); // [rows * top_k, latent]
        })? {}
        be.combine(&routes, &w.results, &mut w.y); // [rows, latent]
        be.rms_norm(&w.y, &self.routed_expert_norm, c.rms_norm_eps, &mut w.z);
        be.matmul(&self.routed_expert_up_proj, &w.z, &mut ws.mixed); // [rows, H]
        be.add(&mut ws.out, &ws.mixed);
        Ok(routes)
    }

    /// `scores = W_gate x`.
    fn score(&self, be: &B, x: &B::Act, scores: &mut B::Act) {
        be.matmul(&self.gate, x, scores);
    }

    /// The `width` best experts of each row.
    fn route(&self, be: &B, c: &K3Config, scores: &B::Act, width: usize) -> Routes {
        be.route(scores, &self.e_score_correction_bias, width, c.routed_scaling_factor)
    }
}

fn situ_caps(c: &K3Config) -> SituCaps {
    SituCaps {
        beta: c.activation_situ_beta,
        linear_beta: c.activation_situ_linear_beta,
    }
}

fn mla_shape(c: &K3Config) -> MlaShape {
    MlaShape {
        heads: c.num_attention_heads,
        nope: c.qk_nope_head_dim,
        shared: c.qk_rope_head_dim,
        value: c.v_head_dim,
        latent: c.kv_lora_rank,
    }
}

mod load;
mod probe;
mod state;
mod workspace;

use load::Loader;
pub use probe::Probe;
use state::LayerState;
pub use state::{State, saved_bytes};
pub use workspace::{LOGIT_ROWS, Workspace, state_bytes, token_bytes};

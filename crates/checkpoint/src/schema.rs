//! Which tensors a Kimi K3 checkpoint holds: names, types, shapes, and the shard that each lies in.
//!
//! This is the only place that knows shapes. Reading compares the files with it, writing follows it.
//!
//! Published shards: layer L (from 0) lies whole in shard L+1; the next shard holds embedding, head and what follows
//! the last layer; then come the projector and the vision tower, which a text model skips. K3 has 93 + 1 + 2 = 96.

use std::collections::HashMap;

use crate::config::{K3Config, MXFP4_GROUP};
use crate::safetensors::{Dtype, Shape};

/// In front of every name of the text model.
pub const TEXT_PREFIX: &str = "language_model.";
/// In front of names that a text model skips.
const VISION_PREFIXES: [&str; 2] = ["vision_tower.", "mm_projector."];
/// In front of a layer's names, behind [`TEXT_PREFIX`].
const LAYER_PREFIX: &str = "model.layers.";
/// Between a layer's number and an expert's.
const EXPERT_INFIX: &str = ".block_sparse_moe.experts.";

/// What a trunk tensor is for; the rows of a size table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// `embed_tokens`, read a row at a time.
    Embedding,
    /// `lm_head`.
    Head,
    /// Norms of the residual stream and the attention-residual vectors.
    Norms,
    /// KDA or MLA, with its own norms.
    Attention,
    /// The dense MLP of the first layers.
    Dense,
    /// Router matrix and selection bias.
    Router,
    /// Projections to and from the experts' latent, and its norm.
    Latent,
    /// The experts that every token uses.
    SharedExperts,
}

impl Class {
    /// Every class, in the order of a size table.
    pub const ALL: [Class; 8] = [
        Class::Embedding,
        Class::Head,
        Class::Norms,
        Class::Attention,
        Class::Dense,
        Class::Router,
        Class::Latent,
        Class::SharedExperts,
    ];

    /// The class in words, for a table.
    pub fn name(self) -> &'static str {
        match self {
            Class::Embedding => "embedding",
            Class::Head => "head",
            Class::Norms => "norms",
            Class::Attention => "attention",
            Class::Dense => "dense MLP",
            Class::Router => "router",
            Class::Latent => "latent projections",
            Class::SharedExperts => "shared experts",
        }
    }
}

/// One tensor of the trunk, which is everything but the routed experts.
#[derive(Debug, Clone)]
pub struct TensorSpec {
    /// Name without the `language_model.` prefix.
    pub name: String,
    /// Layer from 0, or `None` outside the layers.
    pub layer: Option<usize>,
    /// What it is for.
    pub class: Class,
    /// Type as published.
    pub dtype: Dtype,
    /// Shape as published.
    pub shape: Shape,
    /// For `A_log` only, whose published length exceeds the number of heads: the length that is needed.
    pub least_len: Option<u64>,
}

impl TensorSpec {
    /// Whether a stored shape will do.
    pub fn accepts(&self, shape: &Shape) -> bool {
        match (self.least_len, shape.dims()) {
            (Some(least), [len]) => *len >= least,
            (Some(_), _) => false,
            (None, _) => *shape == self.shape,
        }
    }

    /// Bytes as published.
    pub fn bytes(&self) -> u64 {
        self.shape.bytes(self.dtype).unwrap_or(u64::MAX)
    }
}

/// The six tensors of a routed expert, in their published order.
///
/// The expert is `w2 * situ(w1 * z, w3 * z)`: w1 is the gate, w3 the up projection, w2 the down projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExpertPart {
    /// Gate codes, U8 `[moe_intermediate_size, routed_expert_hidden_size / 2]`.
    W1Packed,
    /// Gate scales, U8 `[moe_intermediate_size, routed_expert_hidden_size / 32]`.
    W1Scale,
    /// Down codes, U8 `[routed_expert_hidden_size, moe_intermediate_size / 2]`.
    W2Packed,
    /// Down scales, U8 `[routed_expert_hidden_size, moe_intermediate_size / 32]`.
    W2Scale,
    /// Up codes, shaped as the gate's.
    W3Packed,
    /// Up scales, shaped as the gate's.
    W3Scale,
}

impl ExpertPart {
    /// Number of parts.
    pub const COUNT: usize = 6;

    /// Every part, in published order; `part as usize` is its place here.
    pub const ALL: [ExpertPart; ExpertPart::COUNT] = [
        ExpertPart::W1Packed,
        ExpertPart::W1Scale,
        ExpertPart::W2Packed,
        ExpertPart::W2Scale,
        ExpertPart::W3Packed,
        ExpertPart::W3Scale,
    ];

    /// The end of the tensor's name, such as `w1.weight_packed`.
    pub fn suffix(self) -> &'static str {
        match self {
            ExpertPart::W1Packed => "w1.weight_packed",
            ExpertPart::W1Scale => "w1.weight_scale",
            ExpertPart::W2Packed => "w2.weight_packed",
            ExpertPart::W2Scale => "w2.weight_scale",
            ExpertPart::W3Packed => "w3.weight_packed",
            ExpertPart::W3Scale => "w3.weight_scale",
        }
    }
}

/// The tensor name of one part of an expert, without the `language_model.` prefix.
pub fn expert_tensor_name(layer: usize, expert: usize, part: ExpertPart) -> String {
    format!("{LAYER_PREFIX}{layer}{EXPERT_INFIX}{expert}.{}", part.suffix())
}

/// Bytes by class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sizes {
    classes: [u64; Class::ALL.len()],
    /// All routed experts.
    pub experts: u64,
    /// One routed expert.
    pub one_expert: u64,
    /// The routed experts of one layer.
    pub experts_of_a_layer: u64,
}

impl Sizes {
    /// Bytes of one class.
    pub fn of(&self, class: Class) -> u64 {
        self.classes[class as usize]
    }

    /// Bytes of everything but the routed experts.
    pub fn trunk(&self) -> u64 {
        self.classes.iter().sum()
    }

    /// Bytes of the trunk that every token reads: all but embedding and routed experts.
    pub fn trunk_without_embedding(&self) -> u64 {
        self.trunk() - self.of(Class::Embedding)
    }
}

/// The table of tensors that follows from a configuration.
#[derive(Debug)]
pub struct Schema {
    trunk: Vec<TensorSpec>,
    by_name: HashMap<String, usize>,
    expert_shapes: [Shape; ExpertPart::COUNT],
    /// Layer from 0 to its place among the MoE layers.
    moe_place: Vec<Option<usize>>,
    moe_layers: usize,
    experts: usize,
}

/// What a stored name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slot {
    /// A trunk tensor, by its place in [`Schema::trunk`].
    Trunk(usize),
    /// A part of an expert; `expert` is [`Schema::expert_index`].
    Expert { expert: usize, part: ExpertPart },
    /// A routed expert's weights in a format other than MXFP4.
    PlainExpert,
    /// Vision tower or projector.
    Vision,
    /// Nothing that this architecture has.
    Unknown,
}

impl Schema {
    /// The tensors of a model with this configuration.
    pub fn new(config: &K3Config) -> Schema {
        let mut table = Table {
            trunk: Vec::new(),
            layer: None,
            prefix: String::new(),
        };
        for layer in 0..config.num_hidden_layers {
            table.layer = Some(layer);
            table.prefix = format!("{LAYER_PREFIX}{layer}.");
            table.layer_vectors(config);
            if config.is_mla(layer) {
                table.mla(config);
            } else {
                table.kda(config);
            }
            if config.is_moe(layer) {
                table.moe(config);
            } else {
                table.dense(config);
            }
        }
        (table.layer, table.prefix) = (None, String::new());
        table.globals(config);

        let by_name = table
            .trunk
            .iter()
            .enumerate()
            .map(|(place, spec)| (spec.name.clone(), place))
            .collect();
        let mut moe_layers = 0;
        let moe_place = (0..config.num_hidden_layers)
            .map(|layer| {
                config.is_moe(layer).then(|| {
                    moe_layers += 1;
                    moe_layers - 1
                })
            })
            .collect();
        let expert_shapes = expert_shapes(config);
        Schema {
            trunk: table.trunk,
            by_name,
            expert_shapes,
            moe_place,
            moe_layers,
            experts: config.num_experts,
        }
    }

    /// Every trunk tensor: layer by layer, then what lies outside the layers.
    pub fn trunk(&self) -> &[TensorSpec] {
        &self.trunk
    }

    /// The trunk tensor with this name, given without the `language_model.` prefix.
    pub fn tensor(&self, name: &str) -> Option<&TensorSpec> {
        self.place(name).map(|place| &self.trunk[place])
    }

    /// Its place in [`Schema::trunk`].
    pub(crate) fn place(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The shape of a part of any expert; the type is U8.
    pub fn expert_shape(&self, part: ExpertPart) -> Shape {
        self.expert_shapes[part as usize]
    }

    /// Bytes of a part of any expert.
    pub fn expert_part_bytes(&self, part: ExpertPart) -> u64 {
        self.expert_shape(part).bytes(Dtype::U8).unwrap_or(u64::MAX)
    }

    /// Bytes of one expert: K3's has 17,547,264.
    pub fn expert_bytes(&self) -> u64 {
        ExpertPart::ALL.iter().map(|&part| self.expert_part_bytes(part)).sum()
    }

    /// The number of routed experts over all layers.
    pub fn expert_count(&self) -> usize {
        self.moe_layers * self.experts
    }

    /// The place of an expert among all of them, layer by layer; `None` where the model has no such expert.
    pub fn expert_index(&self, layer: usize, expert: usize) -> Option<usize> {
        let moe_layer = (*self.moe_place.get(layer)?)?;
        (expert < self.experts).then_some(moe_layer * self.experts + expert)
    }

    /// The layer and expert at a place among all experts.
    pub(crate) fn expert_at(&self, index: usize) -> (usize, usize) {
        let moe_layer = index / self.experts;
        let layer = self.moe_place.iter().position(|&place| place == Some(moe_layer));
        (layer.unwrap_or(self.moe_place.len()), index % self.experts)
    }

    /// Bytes by class, as published.
    pub fn sizes(&self) -> Sizes {
        let mut sizes = Sizes {
            one_expert: self.expert_bytes(),
            experts: self.expert_bytes() * self.expert_count() as u64,
            experts_of_a_layer: self.expert_bytes() * self.experts as u64,
            ..Sizes::default()
        };
        for spec in &self.trunk {
            sizes.classes[spec.class as usize] += spec.bytes();
        }
        sizes
    }

    /// What the stored name `name` stands for.
    pub(crate) fn resolve(&self, name: &str) -> Slot {
        let Some(text_name) = name.strip_prefix(TEXT_PREFIX) else {
            let vision = VISION_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
            return if vision { Slot::Vision } else { Slot::Unknown };
        };
        match split_expert_name(text_name) {
            None => self.place(text_name).map_or(Slot::Unknown, Slot::Trunk),
            Some((layer, expert, suffix)) => {
                let Some(expert) = self.expert_index(layer, expert) else {
                    return Slot::Unknown;
                };
                match ExpertPart::ALL.into_iter().find(|part| part.suffix() == suffix) {
                    Some(part) => Slot::Expert { expert, part },
                    None if matches!(suffix, "w1.weight" | "w2.weight" | "w3.weight") => Slot::PlainExpert,
                    None => Slot::Unknown,
                }
            }
        }
    }
}

/// Layer, expert and the rest of an expert tensor's name.
fn split_expert_name(name: &str) -> Option<(usize, usize, &str)> {
    let (layer, rest) = split_number(name.strip_prefix(LAYER_PREFIX)?)?;
    let (expert, rest) = split_number(rest.strip_prefix(EXPERT_INFIX)?)?;
    Some((layer, expert, rest.strip_prefix('.')?))
}

/// A decimal number without leading zeros, and what follows it.
fn split_number(text: &str) -> Option<(usize, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at(digits);
    if digits > 1 && number.starts_with('0') {
        return None;
    }
    Some((number.parse().ok()?, rest))
}

/// Matrices are `[rows, columns]`; columns are the inputs.
fn expert_shapes(config: &K3Config) -> [Shape; ExpertPart::COUNT] {
    let (inner, latent) = (config.moe_intermediate_size, config.routed_expert_hidden_size);
    ExpertPart::ALL.map(|part| match part {
        ExpertPart::W1Packed | ExpertPart::W3Packed => shape(&[inner, latent / 2]),
        ExpertPart::W1Scale | ExpertPart::W3Scale => shape(&[inner, latent / MXFP4_GROUP]),
        ExpertPart::W2Packed => shape(&[latent, inner / 2]),
        ExpertPart::W2Scale => shape(&[latent, inner / MXFP4_GROUP]),
    })
}

/// At most three dimensions, so it always fits.
fn shape(dims: &[usize]) -> Shape {
    let mut wide = [0; 3];
    for (wide, &dim) in wide.iter_mut().zip(dims) {
        *wide = dim as u64;
    }
    Shape::new(&wide[..dims.len()]).unwrap_or_default()
}

/// The table under construction: one row a call, in the words of the checkpoint.
struct Table {
    trunk: Vec<TensorSpec>,
    layer: Option<usize>,
    prefix: String,
}

impl Table {
    fn row(&mut self, class: Class, dtype: Dtype, suffix: &str, dims: &[usize]) {
        let name = format!("{}{suffix}", self.prefix);
        self.trunk.push(TensorSpec {
            name,
            layer: self.layer,
            class,
            dtype,
            shape: shape(dims),
            least_len: None,
        });
    }

    fn globals(&mut self, c: &K3Config) {
        let (hidden, vocab) = (c.hidden_size, c.vocab_size);
        self.row(
            Class::Embedding,
            Dtype::Bf16,
            "model.embed_tokens.weight",
            &[vocab, hidden],
        );
        self.row(Class::Norms, Dtype::Bf16, "model.norm.weight", &[hidden]);
        self.row(
            Class::Norms,
            Dtype::Bf16,
            "model.output_attn_res_norm.weight",
            &[hidden],
        );
        self.row(
            Class::Norms,
            Dtype::Bf16,
            "model.output_attn_res_proj.weight",
            &[1, hidden],
        );
        self.row(Class::Head, Dtype::Bf16, "lm_head.weight", &[vocab, hidden]);
    }

    fn layer_vectors(&mut self, c: &K3Config) {
        let hidden = c.hidden_size;
        for name in [
            "input_layernorm",
            "post_attention_layernorm",
            "self_attention_res_norm",
            "mlp_res_norm",
        ] {
            self.row(Class::Norms, Dtype::Bf16, &format!("{name}.weight"), &[hidden]);
        }
        for name in ["self_attention_res_proj", "mlp_res_proj"] {
            self.row(Class::Norms, Dtype::Bf16, &format!("{name}.weight"), &[1, hidden]);
        }
    }

    /// Channel c of `width` belongs to head c / head_dim.
    fn kda(&mut self, c: &K3Config) {
        let (hidden, width, kda) = (c.hidden_size, c.kda_width(), &c.linear_attn_config);
        let (heads, head_dim) = (kda.num_heads, kda.head_dim);
        for name in ["q_proj", "k_proj", "v_proj", "g_proj"] {
            self.row(
                Class::Attention,
                Dtype::Bf16,
                &format!("self_attn.{name}.weight"),
                &[width, hidden],
            );
        }
        self.row(
            Class::Attention,
            Dtype::Bf16,
            "self_attn.o_proj.weight",
            &[hidden, width],
        );
        self.row(
            Class::Attention,
            Dtype::Bf16,
            "self_attn.f_a_proj.weight",
            &[head_dim, hidden],
        );
        self.row(
            Class::Attention,
            Dtype::Bf16,
            "self_attn.f_b_proj.weight",
            &[width, head_dim],
        );
        self.row(
            Class::Attention,
            Dtype::Bf16,
            "self_attn.b_proj.weight",
            &[heads, hidden],
        );
        // One entry a head, stored head_dim long with zeros behind the last head (K3: 128 for 96 heads).
        self.row(Class::Attention, Dtype::F32, "self_attn.A_log", &[head_dim.max(heads)]);
        if let Some(a_log) = self.trunk.last_mut() {
            a_log.least_len = Some(heads as u64);
        }
        self.row(Class::Attention, Dtype::F32, "self_attn.dt_bias", &[width]);
        for name in ["q_conv1d", "k_conv1d", "v_conv1d"] {
            let dims = [width, 1, kda.short_conv_kernel_size];
            self.row(Class::Attention, Dtype::F32, &format!("self_attn.{name}.weight"), &dims);
        }
        self.row(Class::Attention, Dtype::F32, "self_attn.o_norm.weight", &[head_dim]);
    }

    /// q_b rows of a head: nope then rope; kv_a rows: latent then the shared key; kv_b rows of a head: key then value.
    fn mla(&mut self, c: &K3Config) {
        let (hidden, heads, values) = (
            c.hidden_size,
            c.num_attention_heads,
            c.num_attention_heads * c.v_head_dim,
        );
        for (name, dims) in [
            ("q_a_proj", &[c.q_lora_rank, hidden][..]),
            ("q_a_layernorm", &[c.q_lora_rank]),
            ("q_b_proj", &[heads * c.qk_head_dim(), c.q_lora_rank]),
            ("kv_a_proj_with_mqa", &[c.kv_cache_width(), hidden]),
            ("kv_a_layernorm", &[c.kv_lora_rank]),
            (
                "kv_b_proj",
                &[heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank],
            ),
            ("g_proj", &[values, hidden]),
            ("o_proj", &[hidden, values]),
        ] {
            self.row(Class::Attention, Dtype::Bf16, &format!("self_attn.{name}.weight"), dims);
        }
    }

    fn dense(&mut self, c: &K3Config) {
        self.mlp(Class::Dense, "mlp", c.hidden_size, c.intermediate_size);
    }

    fn moe(&mut self, c: &K3Config) {
        let (hidden, latent, experts) = (c.hidden_size, c.routed_expert_hidden_size, c.num_experts);
        let moe = "block_sparse_moe";
        self.row(
            Class::Router,
            Dtype::Bf16,
            &format!("{moe}.gate.weight"),
            &[experts, hidden],
        );
        self.row(
            Class::Router,
            Dtype::F32,
            &format!("{moe}.gate.e_score_correction_bias"),
            &[experts],
        );
        self.row(
            Class::Latent,
            Dtype::Bf16,
            &format!("{moe}.routed_expert_down_proj.weight"),
            &[latent, hidden],
        );
        self.row(
            Class::Latent,
            Dtype::Bf16,
            &format!("{moe}.routed_expert_norm.weight"),
            &[latent],
        );
        self.row(
            Class::Latent,
            Dtype::Bf16,
            &format!("{moe}.routed_expert_up_proj.weight"),
            &[hidden, latent],
        );
        let shared = format!("{moe}.shared_experts");
        self.mlp(Class::SharedExperts, &shared, hidden, c.shared_intermediate_size());
    }

    fn mlp(&mut self, class: Class, name: &str, hidden: usize, inner: usize) {
        self.row(
            class,
            Dtype::Bf16,
            &format!("{name}.gate_proj.weight"),
            &[inner, hidden],
        );
        self.row(class, Dtype::Bf16, &format!("{name}.up_proj.weight"), &[inner, hidden]);
        self.row(
            class,
            Dtype::Bf16,
            &format!("{name}.down_proj.weight"),
            &[hidden, inner],
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn k3() -> K3Config {
        let text = include_str!("../testdata/kimi-k3-config.json");
        K3Config::parse(text, Path::new("config.json")).unwrap()
    }

    /// Published totals: 2,122 BF16 tensors of which 168 are vision, 506 F32, 494,592 U8; byte counts likewise.
    #[test]
    fn the_release_comes_out_exactly() {
        let schema = Schema::new(&k3());
        let count = |dtype| schema.trunk().iter().filter(|spec| spec.dtype == dtype).count();
        assert_eq!(count(Dtype::Bf16), 2_122 - 168);
        assert_eq!(count(Dtype::F32), 506);
        assert_eq!(schema.expert_count() * ExpertPart::COUNT, 494_592);
        let sizes = schema.sizes();
        assert_eq!(sizes.one_expert, 17_547_264);
        assert_eq!(sizes.experts_of_a_layer, 15_722_348_544);
        assert_eq!(sizes.experts, 1_446_456_066_048);
        assert_eq!(sizes.of(Class::Embedding), 2_348_810_240);
        assert_eq!(sizes.of(Class::Head), 2_348_810_240);
        assert_eq!(sizes.of(Class::Dense), 1_453_326_336);
        assert_eq!(sizes.of(Class::Attention), 69 * 887_800_832 + 24 * 464_392_192);
        assert_eq!(sizes.trunk(), 113_509_540_864);
        assert_eq!(sizes.trunk() + sizes.experts, 1_559_965_606_912);
    }

    #[test]
    fn names_resolve_to_what_they_are() {
        let schema = Schema::new(&k3());
        let resolve = |name: &str| schema.resolve(name);
        let expert = |layer, expert| schema.expert_index(layer, expert).unwrap();
        let name = format!("{TEXT_PREFIX}{}", expert_tensor_name(92, 895, ExpertPart::W3Scale));
        assert_eq!(
            resolve(&name),
            Slot::Expert {
                expert: 82_431,
                part: ExpertPart::W3Scale
            }
        );
        assert_eq!((expert(1, 0), expert(2, 3)), (0, 899));
        assert_eq!(schema.expert_at(899), (2, 3));
        let a_log = schema.place("model.layers.0.self_attn.A_log").unwrap();
        assert_eq!(
            resolve("language_model.model.layers.0.self_attn.A_log"),
            Slot::Trunk(a_log)
        );
        assert_eq!(resolve("mm_projector.proj.0.weight"), Slot::Vision);
        let plain = "language_model.model.layers.1.block_sparse_moe.experts.0.w2.weight";
        assert_eq!(resolve(plain), Slot::PlainExpert);
        for unknown in [
            "model.layers.0.self_attn.A_log",
            "language_model.model.layers.0.self_attn.q_proj.bias",
            "language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight_packed",
            "language_model.model.layers.1.block_sparse_moe.experts.896.w1.weight_packed",
            "language_model.model.layers.01.block_sparse_moe.experts.0.w1.weight_packed",
            "language_model.model.layers.1.block_sparse_moe.experts.0.w4.weight_packed",
            "language_model.model.layers.99999999999999999999999.x",
        ] {
            assert_eq!(resolve(unknown), Slot::Unknown, "{unknown}");
        }
    }

    #[test]
    fn a_log_may_be_longer_than_its_heads() {
        let schema = Schema::new(&k3());
        let a_log = schema.tensor("model.layers.0.self_attn.A_log").unwrap();
        let accepts = |dims: &[u64]| a_log.accepts(&Shape::new(dims).unwrap());
        assert_eq!(a_log.shape.dims(), [128]);
        assert!(accepts(&[96]) && accepts(&[128]) && accepts(&[4096]));
        assert!(!accepts(&[95]) && !accepts(&[96, 1]) && !accepts(&[]));
    }
}

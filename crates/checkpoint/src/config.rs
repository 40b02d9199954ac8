//! `config.json`: the dimensions of a Kimi K3 model.

mod fields;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde_json::{Value, json};

use crate::error::Error;
pub(crate) use fields::Fields;

/// Input columns that share one MXFP4 scale (OCP Microscaling Formats specification 1.0).
pub const MXFP4_GROUP: usize = 32;

/// The largest width, head count times head size included; K3's largest is 163,840.
///
/// With it no product of two widths and an element size leaves 64 bits.
const MAX_WIDTH: usize = 1 << 24;
/// The longest context; K3's is 2^20. With it no size of a sequence's state leaves 64 bits.
const MAX_POSITIONS: usize = 1 << 36;
/// The most layers; K3 has 93.
const MAX_LAYERS: usize = 4096;
/// The most routed experts over all layers; K3 has 82,432. It bounds the table of their places.
const MAX_EXPERTS: usize = 1 << 20;

/// Special tokens above the base vocabulary (Kimi K3 `tokenizer_config.json`).
pub const SPECIAL_TOKENS: usize = 256;
/// Offsets of `[BOS]`, `<|end_of_msg|>` and `[PAD]` from the first special token.
const BOS_OFFSET: usize = 0;
const END_OF_MSG_OFFSET: usize = 2;
const PAD_OFFSET: usize = 255;

/// The text model's configuration; field names are those of `config.json`.
///
/// Layers are counted from 0 everywhere but in the two published lists of [`LinearAttnConfig`].
#[derive(Debug, Clone, PartialEq)]
pub struct K3Config {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Token ids, special ones included; rows of embedding and head.
    pub vocab_size: usize,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Width of the dense MLP of the layers before `first_k_dense_replace`.
    pub intermediate_size: usize,
    /// Added to the mean square in every RMSNorm but the two inside MLA.
    pub rms_norm_eps: f32,
    /// Cap of the gate in SiTU-GLU.
    pub activation_situ_beta: f32,
    /// Cap of the linear half in SiTU-GLU.
    pub activation_situ_linear_beta: f32,
    /// Heads of the MLA layers.
    pub num_attention_heads: usize,
    /// Width of the compressed query of MLA.
    pub q_lora_rank: usize,
    /// Width of the compressed key and value of MLA.
    pub kv_lora_rank: usize,
    /// Part of an MLA head's key that comes from the compressed one.
    pub qk_nope_head_dim: usize,
    /// Part of an MLA head's key that all heads share. No rotation is applied to it.
    pub qk_rope_head_dim: usize,
    /// Value size of an MLA head.
    pub v_head_dim: usize,
    /// Layers in one block of the attention residuals.
    pub attn_res_block_size: usize,
    /// Routed experts of a MoE layer.
    pub num_experts: usize,
    /// Routed experts that a token uses (top-k).
    pub num_experts_per_token: usize,
    /// Experts that every token uses, fused into one MLP.
    pub num_shared_experts: usize,
    /// Inner width of one expert.
    pub moe_intermediate_size: usize,
    /// Width of the latent that routed experts read and write.
    pub routed_expert_hidden_size: usize,
    /// The first layers have a dense MLP, this many of them.
    pub first_k_dense_replace: usize,
    /// Of the layers behind those, the ones divisible by this have routed experts.
    pub moe_layer_freq: usize,
    /// Factor of the normalised router weights.
    pub routed_scaling_factor: f32,
    /// `[BOS]`.
    pub bos_token_id: u32,
    /// `<|end_of_msg|>`.
    pub eos_token_id: u32,
    /// `[PAD]`.
    pub pad_token_id: u32,
    /// Which layers are KDA, and their dimensions.
    pub linear_attn_config: LinearAttnConfig,
}

/// `linear_attn_config`: which layers are KDA, and their dimensions.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearAttnConfig {
    /// MLA layers, counted from 1, ascending.
    pub full_attn_layers: Vec<usize>,
    /// KDA layers, counted from 1, ascending.
    pub kda_layers: Vec<usize>,
    /// Heads of the KDA layers.
    pub num_heads: usize,
    /// Key and value size of a head.
    pub head_dim: usize,
    /// Taps of the short convolution, the current token included.
    pub short_conv_kernel_size: usize,
    /// The most negative log decay, below zero.
    pub gate_lower_bound: f32,
}

impl K3Config {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    ///
    /// The file cannot be read, is not JSON, or a field is missing, contradicts another, or asks for something
    /// that is not supported; the field is named. Unknown fields are passed over.
    pub fn read(path: &Path) -> Result<K3Config, Error> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "read", e))?;
        K3Config::parse(&text, path)
    }

    /// Checks the text of a `config.json`; `path` is for messages only.
    ///
    /// # Errors
    ///
    /// As [`K3Config::read`].
    pub fn parse(text: &str, path: &Path) -> Result<K3Config, Error> {
        let root = parse_json(text, path)?;
        let root = Fields::root(path, &root)?;
        root.must_be("model_type", None, json!("kimi_k3"))?;
        let text = root.object("text_config", "text_config")?;
        refuse_unsupported(&root, &text)?;
        check_quantization(&root, &text)?;
        let linear = text.object("linear_attn_config", "text_config.linear_attn_config")?;

        let width = |name| text.count(name, 1, MAX_WIDTH);
        let config = K3Config {
            hidden_size: width("hidden_size")?,
            num_hidden_layers: text.count("num_hidden_layers", 1, MAX_LAYERS)?,
            vocab_size: width("vocab_size")?,
            max_position_embeddings: text.count_or("max_position_embeddings", 1 << 20, 1, MAX_POSITIONS)?,
            intermediate_size: width("intermediate_size")?,
            rms_norm_eps: text.number("rms_norm_eps")?,
            activation_situ_beta: text.number_or("activation_situ_beta", 4.0)?,
            activation_situ_linear_beta: text.number_or("activation_situ_linear_beta", 25.0)?,
            num_attention_heads: width("num_attention_heads")?,
            q_lora_rank: width("q_lora_rank")?,
            kv_lora_rank: width("kv_lora_rank")?,
            qk_nope_head_dim: width("qk_nope_head_dim")?,
            qk_rope_head_dim: width("qk_rope_head_dim")?,
            v_head_dim: width("v_head_dim")?,
            attn_res_block_size: text.count("attn_res_block_size", 1, MAX_LAYERS)?,
            num_experts: text.count("num_experts", 1, MAX_EXPERTS)?,
            num_experts_per_token: text.count("num_experts_per_token", 1, MAX_EXPERTS)?,
            num_shared_experts: text.count("num_shared_experts", 1, MAX_EXPERTS)?,
            moe_intermediate_size: width("moe_intermediate_size")?,
            routed_expert_hidden_size: width("routed_expert_hidden_size")?,
            first_k_dense_replace: text.count("first_k_dense_replace", 0, MAX_LAYERS)?,
            moe_layer_freq: text.count_or("moe_layer_freq", 1, 1, MAX_LAYERS)?,
            routed_scaling_factor: text.number_or("routed_scaling_factor", 1.0)?,
            bos_token_id: 0,
            eos_token_id: 0,
            pad_token_id: 0,
            linear_attn_config: parse_linear(&linear)?,
        };
        let config = config.with_special_ids(&root, &text)?;
        config.check(&text, &linear)?;
        Ok(config)
    }

    /// Takes the three special ids from either object; absent ones get their published places.
    fn with_special_ids(mut self, root: &Fields<'_>, text: &Fields<'_>) -> Result<K3Config, Error> {
        let first = self
            .vocab_size
            .checked_sub(SPECIAL_TOKENS)
            .filter(|base| *base > 0)
            .ok_or_else(|| {
                text.wrong(
                    "vocab_size",
                    self.vocab_size,
                    format!("more than the {SPECIAL_TOKENS} special tokens"),
                )
            })?;
        let id = |name, offset| -> Result<u32, Error> {
            let holder = if text.get(name).is_some() { text } else { root };
            Ok(holder.count_or(name, first + offset, 0, self.vocab_size - 1)? as u32)
        };
        let ids = (
            id("bos_token_id", BOS_OFFSET)?,
            id("eos_token_id", END_OF_MSG_OFFSET)?,
            id("pad_token_id", PAD_OFFSET)?,
        );
        (self.bos_token_id, self.eos_token_id, self.pad_token_id) = ids;
        Ok(self)
    }

    /// What the fields must be to each other.
    fn check(&self, text: &Fields<'_>, linear: &Fields<'_>) -> Result<(), Error> {
        for (name, value) in [
            ("rms_norm_eps", self.rms_norm_eps),
            ("activation_situ_beta", self.activation_situ_beta),
            ("activation_situ_linear_beta", self.activation_situ_linear_beta),
        ] {
            if value <= 0.0 {
                return Err(text.wrong(name, value, "a number above 0"));
            }
        }
        let bound = self.linear_attn_config.gate_lower_bound;
        if bound >= 0.0 {
            return Err(linear.wrong("gate_lower_bound", bound, "a number below 0"));
        }
        let key_heads = text.count_or("num_key_value_heads", self.num_attention_heads, 1, MAX_WIDTH)?;
        if key_heads != self.num_attention_heads {
            let expected = format!("{} as num_attention_heads", self.num_attention_heads);
            return Err(text.wrong("num_key_value_heads", key_heads, expected));
        }
        if self.num_experts_per_token > self.num_experts {
            let expected = format!("at most num_experts, which is {}", self.num_experts);
            return Err(text.wrong("num_experts_per_token", self.num_experts_per_token, expected));
        }
        for (name, value) in [
            ("routed_expert_hidden_size", self.routed_expert_hidden_size),
            ("moe_intermediate_size", self.moe_intermediate_size),
        ] {
            if value % MXFP4_GROUP != 0 {
                let expected = format!("a multiple of {MXFP4_GROUP}, the columns of one MXFP4 scale");
                return Err(text.wrong(name, value, expected));
            }
        }
        if self.first_k_dense_replace > self.num_hidden_layers {
            let expected = format!("at most num_hidden_layers, which is {}", self.num_hidden_layers);
            return Err(text.wrong("first_k_dense_replace", self.first_k_dense_replace, expected));
        }
        check_layer_lists(&self.linear_attn_config, self.num_hidden_layers, linear)?;
        self.check_products(text, linear)
    }

    /// Products of fields stay inside the limits at the top of this file.
    fn check_products(&self, text: &Fields<'_>, linear: &Fields<'_>) -> Result<(), Error> {
        let heads = self.num_attention_heads;
        for (fields, name, count, size) in [
            (text, "num_attention_heads", heads, self.qk_head_dim()),
            (
                text,
                "num_attention_heads",
                heads,
                self.qk_nope_head_dim + self.v_head_dim,
            ),
            (
                text,
                "num_shared_experts",
                self.num_shared_experts,
                self.moe_intermediate_size,
            ),
            (
                linear,
                "num_heads",
                self.linear_attn_config.num_heads,
                self.linear_attn_config.head_dim,
            ),
        ] {
            if count.saturating_mul(size) > MAX_WIDTH {
                return Err(fields.wrong(
                    name,
                    format!("{count} times {size}"),
                    format!("a product of at most {MAX_WIDTH}"),
                ));
            }
        }
        let experts = self.num_experts.saturating_mul(self.moe_layers());
        if experts > MAX_EXPERTS {
            let expected = format!("at most {MAX_EXPERTS} experts over all layers");
            return Err(text.wrong(
                "num_experts",
                format!("{experts} over {} layers", self.moe_layers()),
                expected,
            ));
        }
        Ok(())
    }

    /// Whether layer `layer` (from 0) attends with MLA; the others are KDA.
    pub fn is_mla(&self, layer: usize) -> bool {
        self.linear_attn_config
            .full_attn_layers
            .binary_search(&(layer + 1))
            .is_ok()
    }

    /// Whether layer `layer` (from 0) has routed experts; the others have a dense MLP.
    pub fn is_moe(&self, layer: usize) -> bool {
        layer < self.num_hidden_layers
            && layer >= self.first_k_dense_replace
            && layer.is_multiple_of(self.moe_layer_freq)
    }

    /// The number of layers with routed experts.
    pub fn moe_layers(&self) -> usize {
        (0..self.num_hidden_layers).filter(|&layer| self.is_moe(layer)).count()
    }

    /// Query and key size of an MLA head: `qk_nope_head_dim + qk_rope_head_dim`.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Numbers that an MLA layer keeps for a token: `kv_lora_rank + qk_rope_head_dim`.
    pub fn kv_cache_width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// Channels of a KDA layer: `num_heads * head_dim`.
    pub fn kda_width(&self) -> usize {
        self.linear_attn_config.num_heads * self.linear_attn_config.head_dim
    }

    /// Width of the shared experts, which are one fused MLP: `num_shared_experts * moe_intermediate_size`.
    pub fn shared_intermediate_size(&self) -> usize {
        self.num_shared_experts * self.moe_intermediate_size
    }

    /// The id of the first special token, which is the size of the base vocabulary.
    pub fn first_special_id(&self) -> u32 {
        (self.vocab_size - SPECIAL_TOKENS) as u32
    }
}

/// Parses JSON, with the file in the error.
pub(crate) fn parse_json(text: &str, path: &Path) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(|e| Error::Json {
        path: path.to_owned(),
        found: format!("text that is not JSON ({e})"),
        expected: "a JSON object",
    })
}

/// Refuses, by name, every choice that the release does not make and this program does not implement.
fn refuse_unsupported(root: &Fields<'_>, text: &Fields<'_>) -> Result<(), Error> {
    for (name, default, expected) in [
        ("model_type", None, json!("kimi_linear")),
        ("hidden_act", None, json!("situ")),
        ("mla_use_nope", None, json!(true)),
        ("mla_use_output_gate", None, json!(true)),
        ("latent_moe_use_norm", None, json!(true)),
        ("moe_router_activation_func", None, json!("sigmoid")),
        ("moe_renormalize", Some(json!(true)), json!(true)),
        ("topk_method", Some(json!("noaux_tc")), json!("noaux_tc")),
        ("num_expert_group", Some(json!(1)), json!(1)),
        ("topk_group", Some(json!(1)), json!(1)),
        ("num_nextn_predict_layers", Some(json!(0)), json!(0)),
        ("tie_word_embeddings", Some(json!(false)), json!(false)),
        ("dtype", Some(json!("bfloat16")), json!("bfloat16")),
    ] {
        text.must_be(name, default, expected)?;
    }
    root.must_be("tie_word_embeddings", Some(json!(false)), json!(false))
}

/// MXFP4 in groups of 32 is the only quantisation; a config that names none is judged by its tensors.
fn check_quantization(root: &Fields<'_>, text: &Fields<'_>) -> Result<(), Error> {
    let quant = if text.get("quantization_config").is_some() {
        text.object("quantization_config", "text_config.quantization_config")?
    } else if root.get("quantization_config").is_some() {
        root.object("quantization_config", "quantization_config")?
    } else {
        return Ok(());
    };
    quant.must_be("quant_method", None, json!("compressed-tensors"))?;
    quant.must_be("format", None, json!("mxfp4-pack-quantized"))?;
    if quant.get("config_groups").is_none() {
        return Ok(());
    }
    let groups = quant.object("config_groups", "quantization_config.config_groups")?;
    for name in groups.names() {
        let full = format!("quantization_config.config_groups.{name}");
        let weights_full = format!("{full}.weights");
        let weights = groups.object(name, &full)?.object("weights", &weights_full)?;
        weights.must_be("num_bits", None, json!(4))?;
        weights.must_be("type", Some(json!("float")), json!("float"))?;
        weights.must_be("group_size", None, json!(MXFP4_GROUP))?;
    }
    Ok(())
}

fn parse_linear(linear: &Fields<'_>) -> Result<LinearAttnConfig, Error> {
    linear.must_be("use_full_rank_gate", Some(json!(true)), json!(true))?;
    let mut full_attn_layers = linear.counts("full_attn_layers")?;
    let mut kda_layers = linear.counts("kda_layers")?;
    full_attn_layers.sort_unstable();
    kda_layers.sort_unstable();
    Ok(LinearAttnConfig {
        full_attn_layers,
        kda_layers,
        num_heads: linear.count("num_heads", 1, MAX_WIDTH)?,
        head_dim: linear.count("head_dim", 1, MAX_WIDTH)?,
        short_conv_kernel_size: linear.count("short_conv_kernel_size", 2, 64)?,
        gate_lower_bound: linear.number("gate_lower_bound")?,
    })
}

/// The two lists, together, name each layer from 1 to `layers` once.
fn check_layer_lists(lists: &LinearAttnConfig, layers: usize, linear: &Fields<'_>) -> Result<(), Error> {
    let mut kinds = vec![None; layers];
    for (name, list) in [
        ("full_attn_layers", &lists.full_attn_layers),
        ("kda_layers", &lists.kda_layers),
    ] {
        for &layer in list {
            let place = layer.checked_sub(1).and_then(|index| kinds.get_mut(index));
            let Some(kind) = place else {
                return Err(linear.wrong(name, format!("layer {layer}"), format!("layers from 1 to {layers}")));
            };
            if let Some(first) = kind.replace(name) {
                let found = format!("layer {layer}, which {first} has too");
                return Err(linear.wrong(name, found, "each layer once"));
            }
        }
    }
    match kinds.iter().position(Option::is_none) {
        None => Ok(()),
        Some(index) => {
            let found = format!("no layer {} in it or in full_attn_layers", index + 1);
            Err(linear.wrong(
                "kda_layers",
                found,
                format!("every layer from 1 to {layers} in one of the two"),
            ))
        }
    }
}

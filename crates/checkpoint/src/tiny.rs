//! A tiny model with weights that anyone can recompute, for tests.
//!
//! Thirteen layers of the release's kinds with 4,708,960 parameters, in one shard of 6.9 MB. Element n of the model,
//! counted over all tensors in the order of [`write_tiny`]'s lists, is made from output n of splitmix64 with seed 0
//! as a number u(n) in [-1, 1); an independent NumPy program makes the same file, byte for byte.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use crate::config::K3Config;
use crate::error::Error;
use crate::index::INDEX_FILE;
use crate::safetensors::{Dtype, Shape};
use crate::schema::{ExpertPart, Schema, TEXT_PREFIX, expert_tensor_name};
use crate::synth::fill::{bf16_bits, splitmix64};
use crate::synth::plan::{Tensor, header};

/// The tiny model's `config.json`.
pub const TINY_CONFIG: &str = include_str!("../testdata/k3-tiny-config.json");

/// File name of its only shard.
pub const TINY_SHARD: &str = "model-00001-of-000001.safetensors";

const LAYER_VECTORS: [&str; 6] = [
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attention_res_norm.weight",
    "mlp_res_norm.weight",
    "self_attention_res_proj.weight",
    "mlp_res_proj.weight",
];
const MLA: [&str; 8] = [
    "self_attn.q_a_proj.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.g_proj.weight",
    "self_attn.o_proj.weight",
];
const KDA: [&str; 14] = [
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.g_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.f_a_proj.weight",
    "self_attn.f_b_proj.weight",
    "self_attn.b_proj.weight",
    "self_attn.A_log",
    "self_attn.dt_bias",
    "self_attn.q_conv1d.weight",
    "self_attn.k_conv1d.weight",
    "self_attn.v_conv1d.weight",
    "self_attn.o_norm.weight",
];
const DENSE: [&str; 3] = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"];
const MOE: [&str; 8] = [
    "block_sparse_moe.gate.weight",
    BIAS,
    "block_sparse_moe.routed_expert_down_proj.weight",
    "block_sparse_moe.routed_expert_up_proj.weight",
    "block_sparse_moe.routed_expert_norm.weight",
    "block_sparse_moe.shared_experts.gate_proj.weight",
    "block_sparse_moe.shared_experts.up_proj.weight",
    "block_sparse_moe.shared_experts.down_proj.weight",
];
const BIAS: &str = "block_sparse_moe.gate.e_score_correction_bias";
const FINAL: [&str; 3] = [
    "model.norm.weight",
    "model.output_attn_res_norm.weight",
    "model.output_attn_res_proj.weight",
];
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Writes the tiny model (`config.json`, index and one shard) into the folder `out`, which is made if need be.
///
/// # Errors
///
/// The folder or a file cannot be written.
pub fn write_tiny(out: &Path) -> Result<(), Error> {
    let config = K3Config::parse(TINY_CONFIG, Path::new("config.json"))?;
    let schema = Schema::new(&config);
    let data = make_data(&config, &schema);
    let tensors: Vec<Tensor> = stored_order(&config).iter().map(|name| tensor(&schema, name)).collect();
    let mut shard = header(&tensors);
    let mut total = 0;
    let mut weight_map = serde_json::Map::new();
    for tensor in &tensors {
        let bytes = &data[tensor.name.as_str()];
        total += bytes.len();
        shard.extend_from_slice(bytes);
        weight_map.insert(tensor.name.clone(), TINY_SHARD.into());
    }
    let index = serde_json::json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    fs::create_dir_all(out).map_err(|e| Error::io(out, "create the folder", e))?;
    for (name, bytes) in [
        (TINY_SHARD, shard.as_slice()),
        (INDEX_FILE, index.to_string().as_bytes()),
        ("config.json", TINY_CONFIG.as_bytes()),
    ] {
        let path = out.join(name);
        fs::write(&path, bytes).map_err(|e| Error::io(&path, "write", e))?;
    }
    Ok(())
}

/// The order in which elements are counted.
fn counted_order(config: &K3Config) -> Vec<String> {
    let mut names = vec![EMBEDDING.to_owned()];
    for layer in 0..config.num_hidden_layers {
        let attention = if config.is_mla(layer) { &MLA[..] } else { &KDA };
        let mlp = if config.is_moe(layer) { &MOE[..] } else { &DENSE };
        for suffix in LAYER_VECTORS.iter().chain(attention).chain(mlp) {
            names.push(format!("model.layers.{layer}.{suffix}"));
        }
        names.extend(experts(config, layer));
    }
    names.extend(FINAL.map(str::to_owned));
    names.push(HEAD.to_owned());
    names
}

/// The order in the file: experts last, the router's bias in front of its matrix.
fn stored_order(config: &K3Config) -> Vec<String> {
    let mut names: Vec<String> = [HEAD, EMBEDDING].into_iter().chain(FINAL).map(str::to_owned).collect();
    for layer in 0..config.num_hidden_layers {
        let attention = if config.is_mla(layer) { &MLA[..] } else { &KDA };
        let mut mlp = if config.is_moe(layer) {
            MOE.to_vec()
        } else {
            DENSE.to_vec()
        };
        mlp.sort_by_key(|&name| name != BIAS);
        for suffix in LAYER_VECTORS.iter().chain(attention).chain(&mlp) {
            names.push(format!("model.layers.{layer}.{suffix}"));
        }
    }
    names.extend((0..config.num_hidden_layers).flat_map(|layer| experts(config, layer)));
    names
}

fn experts(config: &K3Config, layer: usize) -> Vec<String> {
    let experts = if config.is_moe(layer) { config.num_experts } else { 0 };
    let parts = |expert| ExpertPart::ALL.map(|part| expert_tensor_name(layer, expert, part));
    (0..experts).flat_map(parts).collect()
}

fn tensor(schema: &Schema, name: &str) -> Tensor {
    let (dtype, shape) = match schema.tensor(name) {
        Some(spec) => (spec.dtype, spec.shape),
        None => {
            let part = ExpertPart::ALL.into_iter().find(|part| name.ends_with(part.suffix()));
            (
                Dtype::U8,
                part.map_or(Shape::default(), |part| schema.expert_shape(part)),
            )
        }
    };
    Tensor {
        name: format!("{TEXT_PREFIX}{name}"),
        dtype,
        shape,
    }
}

/// The bytes of every tensor, by full name.
fn make_data(config: &K3Config, schema: &Schema) -> HashMap<String, Vec<u8>> {
    let mut counter = 0;
    let heads = config.linear_attn_config.num_heads;
    let order = counted_order(config);
    let make = |name: &String| {
        let tensor = tensor(schema, name);
        let elements = tensor.shape.elements().unwrap_or(0) as usize;
        // What A_log holds behind its heads is not counted.
        let counted = if name.ends_with("A_log") { heads } else { elements };
        let mut bytes = Vec::with_capacity(elements * tensor.dtype.bytes() as usize);
        for _ in 0..counted {
            element(&mut bytes, name, &tensor, unit(counter));
            counter += 1;
        }
        bytes.resize(elements * tensor.dtype.bytes() as usize, 0);
        (tensor.name, bytes)
    };
    order.iter().map(make).collect()
}

/// u(n): the upper 24 bits of output n, as a number in [-1, 1).
fn unit(n: u64) -> f64 {
    (splitmix64(0, n) >> 40) as f64 / f64::from(1 << 23) - 1.0
}

/// Appends one element. The order of the f64 operations is part of the definition.
fn element(bytes: &mut Vec<u8>, name: &str, tensor: &Tensor, u: f64) {
    let columns = tensor.shape.dims().last().copied().unwrap_or(1) as f64;
    match tensor.dtype {
        Dtype::U8 if name.ends_with("weight_packed") => bytes.push(((u + 1.0) * 128.0) as u8),
        Dtype::U8 => bytes.push(121 + ((u + 1.0) * 1.5) as u8),
        Dtype::F32 => {
            let (half, middle) = match name.rsplit_once("self_attn.").map_or(name, |(_, suffix)| suffix) {
                "A_log" => (0.7, 0.7),
                "dt_bias" => (2.0, -2.0),
                "o_norm.weight" => (0.1, 1.0),
                suffix if suffix.ends_with("conv1d.weight") => (0.5, 0.0),
                _ => (0.1, 0.0),
            };
            bytes.extend(((middle + half * u) as f32).to_le_bytes());
        }
        _ => {
            let value = if tensor.shape.dims().len() == 1 {
                1.0 + 0.1 * u
            } else if name == EMBEDDING {
                u * f64::sqrt(columns / 3.0) * f64::sqrt(3.0 / columns)
            } else {
                u * f64::sqrt(3.0 / columns)
            };
            bytes.extend(bf16_bits(value as f32).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    #[test]
    fn the_shard_is_the_published_file() {
        let dir = tempfile::tempdir().unwrap();
        write_tiny(dir.path()).unwrap();
        let bytes = fs::read(dir.path().join(TINY_SHARD)).unwrap();
        let hash: String = Sha256::digest(&bytes)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(hash, "d58c609a3be1158352ca3f3c55d93e749bf1c7c7117a2042ade6943d179b458b");
        let checkpoint = crate::Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.max_extents(), 1);
        assert_eq!(checkpoint.stop_ids(), [502]);
    }
}

//! The tensors of the projector and the vision tower, which a text model skips.
//!
//! A synthetic checkpoint holds them so that its files are those of the release: 168 tensors, 46,144,512 parameters in
//! the projector's shard and 401,214,464 in the tower's.

use serde_json::Value;

use super::plan::Tensor;
use crate::config::Fields;
use crate::error::Error;
use crate::safetensors::{Dtype, Shape};

/// The largest value of a field; K3's largest is 4096.
const MAX_DIM: usize = 1 << 20;

/// The dimensions in `vision_config` that shapes depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct VisionConfig {
    layers: usize,
    hidden: usize,
    inner: usize,
    qkv: usize,
    patch: usize,
    grid: [usize; 2],
    /// Patches merged into one token, times their width.
    merged: usize,
    text_hidden: usize,
}

impl VisionConfig {
    /// The `vision_config` of a `config.json`; `None` for a model without one.
    pub(super) fn parse(root: &Fields<'_>, text_hidden: usize) -> Result<Option<VisionConfig>, Error> {
        if root.get("vision_config").is_none() {
            return Ok(None);
        }
        let vision = root.object("vision_config", "vision_config")?;
        let dim = |name| vision.count(name, 1, MAX_DIM);
        let merge = vision.counts("merge_kernel_size")?;
        let merge = match merge[..] {
            [rows, columns] if (1..=64).contains(&rows) && (1..=64).contains(&columns) => rows * columns,
            _ => {
                let found = vision
                    .get("merge_kernel_size")
                    .map(Value::to_string)
                    .unwrap_or_default();
                return Err(vision.wrong("merge_kernel_size", found, "two whole numbers from 1 to 64"));
            }
        };
        Ok(Some(VisionConfig {
            layers: vision.count("vt_num_hidden_layers", 0, 4096)?,
            hidden: dim("vt_hidden_size")?,
            inner: dim("vt_intermediate_size")?,
            qkv: dim("qkv_hidden_size")?,
            patch: dim("patch_size")?,
            grid: [dim("init_pos_emb_height")?, dim("init_pos_emb_width")?],
            merged: merge * dim("mm_hidden_size")?,
            text_hidden,
        }))
    }

    /// The shard with the projector.
    pub(super) fn projector(&self) -> Vec<Tensor> {
        vec![
            tensor("mm_projector.proj.0.weight".into(), &[self.merged, self.merged]),
            tensor("mm_projector.proj.2.weight".into(), &[self.text_hidden, self.merged]),
            tensor("mm_projector.post_norm.weight".into(), &[self.text_hidden]),
        ]
    }

    /// The shard with the vision tower.
    pub(super) fn tower(&self) -> Vec<Tensor> {
        let hidden = self.hidden;
        let mut tensors = vec![
            tensor(
                "vision_tower.patch_embed.proj.weight".into(),
                &[hidden, 3, self.patch, self.patch],
            ),
            tensor(
                "vision_tower.patch_embed.pos_emb.weight".into(),
                &[self.grid[0], self.grid[1], hidden],
            ),
            tensor("vision_tower.encoder.final_layernorm.weight".into(), &[hidden]),
        ];
        for block in 0..self.layers {
            for (name, dims) in [
                ("norm0", &[hidden][..]),
                ("norm1", &[hidden]),
                ("wqkv", &[3 * self.qkv, hidden]),
                ("wo", &[hidden, self.qkv]),
                ("mlp.fc0", &[self.inner, hidden]),
                ("mlp.fc1", &[hidden, self.inner]),
            ] {
                tensors.push(tensor(
                    format!("vision_tower.encoder.blocks.{block}.{name}.weight"),
                    dims,
                ));
            }
        }
        tensors
    }
}

/// At most four dimensions, so it always fits.
fn tensor(name: String, dims: &[usize]) -> Tensor {
    let mut wide = [0; 4];
    for (wide, &dim) in wide.iter_mut().zip(dims) {
        *wide = dim as u64;
    }
    Tensor {
        name,
        dtype: Dtype::Bf16,
        shape: Shape::new(&wide[..dims.len()]).unwrap_or_default(),
    }
}

//! Every tensor of a checkpoint as f64, read with plain file reads.

use checkpoint::{Checkpoint, Dtype, ExpertPart, expert_tensor_name};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// Row-major numbers; a vector is one row.
pub struct Tensor {
    pub cols: usize,
    pub data: Vec<f64>,
}

impl Tensor {
    pub fn row(&self, i: usize) -> &[f64] {
        &self.data[i * self.cols..][..self.cols]
    }

    /// `W x`.
    pub fn times(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(self.cols, x.len());
        self.data.chunks_exact(self.cols).map(|w| super::dot(w, x)).collect()
    }
}

/// Tensors by name without the `language_model.` prefix. An expert's matrix bears the name of its packed bytes.
pub fn read_all(checkpoint: &Checkpoint, swap_nibbles: bool) -> HashMap<String, Tensor> {
    let bytes = |shard: usize, offset: u64, len: u64| {
        let mut file = File::open(&checkpoint.shards()[shard].path).unwrap();
        file.seek(SeekFrom::Start(offset)).unwrap();
        let mut bytes = vec![0; len as usize];
        file.read_exact(&mut bytes).unwrap();
        bytes
    };
    let mut all = HashMap::new();
    for spec in checkpoint.schema().trunk() {
        let info = checkpoint.tensor(&spec.name).unwrap();
        let data = numbers(info.dtype, &bytes(info.shard, info.offset, info.len));
        let cols = info.shape.dims()[info.shape.dims().len() - 1] as usize;
        all.insert(spec.name.clone(), Tensor { cols, data });
    }
    let c = checkpoint.config();
    for layer in (0..c.num_hidden_layers).filter(|layer| c.is_moe(*layer)) {
        for expert in 0..c.num_experts {
            let place = checkpoint.expert(layer, expert).unwrap();
            let part = |part| {
                let at = place.part(part);
                let extent = place.extents()[at.extent];
                bytes(extent.shard, extent.offset + at.offset, at.len)
            };
            for (packed, scale, cols) in [
                (ExpertPart::W1Packed, ExpertPart::W1Scale, c.routed_expert_hidden_size),
                (ExpertPart::W2Packed, ExpertPart::W2Scale, c.moe_intermediate_size),
                (ExpertPart::W3Packed, ExpertPart::W3Scale, c.routed_expert_hidden_size),
            ] {
                let data = mxfp4(&part(packed), &part(scale), swap_nibbles);
                all.insert(expert_tensor_name(layer, expert, packed), Tensor { cols, data });
            }
        }
    }
    all
}

fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F32 => {
            let words = bytes.as_chunks::<4>().0.iter();
            words.map(|b| f32::from_le_bytes(*b) as f64).collect()
        }
        Dtype::Bf16 => {
            let words = bytes.as_chunks::<2>().0.iter();
            words
                .map(|b| f32::from_bits((u16::from_le_bytes(*b) as u32) << 16) as f64)
                .collect()
        }
        other => panic!("no trunk tensor is {other:?}"),
    }
}

/// A byte is two columns, the even one low; a scale byte is a power of two for 32 columns (OCP Microscaling Formats, v1.0).
fn mxfp4(packed: &[u8], scale: &[u8], swap_nibbles: bool) -> Vec<f64> {
    const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let mut values = vec![];
    for (sixteen, scale) in packed.chunks_exact(16).zip(scale) {
        let factor = 2.0_f64.powi(*scale as i32 - 127);
        for byte in sixteen {
            let (low, high) = (byte & 15, byte >> 4);
            for nibble in if swap_nibbles { [high, low] } else { [low, high] } {
                let sign = if nibble < 8 { 1.0 } else { -1.0 };
                values.push(sign * MAGNITUDES[(nibble % 8) as usize] * factor);
            }
        }
    }
    values
}

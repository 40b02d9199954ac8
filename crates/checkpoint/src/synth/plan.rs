//! Which files a checkpoint of the published layout has, and what each holds.

use std::fmt::Write;

use super::vision::VisionConfig;
use crate::config::K3Config;
use crate::safetensors::{Dtype, Shape};
use crate::schema::{ExpertPart, Schema, TEXT_PREFIX, expert_tensor_name};

/// Header and data are padded to this many bytes, as the format's own writer does.
const HEADER_ALIGN: usize = 8;

/// A tensor to be written, with its full name.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Shape,
}

impl Tensor {
    pub(super) fn bytes(&self) -> u64 {
        self.shape.bytes(self.dtype).unwrap_or(u64::MAX)
    }
}

/// The files of one checkpoint.
pub(super) struct Plan {
    pub(super) config: K3Config,
    pub(super) schema: Schema,
    vision: Option<VisionConfig>,
}

/// One shard: its header as bytes of the file, and its tensors in the order of their data.
pub(super) struct ShardPlan {
    pub(super) header: Vec<u8>,
    pub(super) tensors: Vec<Tensor>,
    pub(super) data_bytes: u64,
}

impl Plan {
    pub(super) fn new(config: K3Config, vision: Option<VisionConfig>) -> Plan {
        Plan {
            schema: Schema::new(&config),
            config,
            vision,
        }
    }

    /// One shard a layer, one for what lies outside the layers, two for vision where there is any.
    pub(super) fn shards(&self) -> usize {
        self.config.num_hidden_layers + 1 + if self.vision.is_some() { 2 } else { 0 }
    }

    /// The published file name of shard `number`, from 0.
    pub(super) fn file_name(&self, number: usize) -> String {
        format!("model-{:05}-of-{:06}.safetensors", number + 1, self.shards())
    }

    /// The contents of shard `number`, from 0.
    pub(super) fn shard(&self, number: usize) -> ShardPlan {
        let layers = self.config.num_hidden_layers;
        let mut tensors = match (number.checked_sub(layers), &self.vision) {
            (None, _) => self.text_tensors(Some(number)),
            (Some(1), Some(vision)) => vision.projector(),
            (Some(2), Some(vision)) => vision.tower(),
            _ => self.text_tensors(None),
        };
        // The format's own writer orders by alignment, widest first, then by name; that is what puts the six
        // tensors of an expert side by side.
        tensors.sort_unstable_by(|a, b| (b.dtype.bytes(), &a.name).cmp(&(a.dtype.bytes(), &b.name)));
        let data_bytes = tensors.iter().map(Tensor::bytes).sum();
        ShardPlan {
            header: header(&tensors),
            tensors,
            data_bytes,
        }
    }

    fn text_tensors(&self, layer: Option<usize>) -> Vec<Tensor> {
        let trunk = self.schema.trunk().iter().filter(|spec| spec.layer == layer);
        let mut tensors: Vec<Tensor> = trunk
            .map(|spec| Tensor {
                name: format!("{TEXT_PREFIX}{}", spec.name),
                dtype: spec.dtype,
                shape: spec.shape,
            })
            .collect();
        if let Some(layer) = layer.filter(|&layer| self.config.is_moe(layer)) {
            for expert in 0..self.config.num_experts {
                tensors.extend(ExpertPart::ALL.map(|part| Tensor {
                    name: format!("{TEXT_PREFIX}{}", expert_tensor_name(layer, expert, part)),
                    dtype: Dtype::U8,
                    shape: self.schema.expert_shape(part),
                }));
            }
        }
        tensors
    }
}

/// The length and the JSON in front of the data of `tensors`, which follow each other in this order.
pub(crate) fn header(tensors: &[Tensor]) -> Vec<u8> {
    let mut json = String::from("{");
    let mut begin = 0;
    for (place, tensor) in tensors.iter().enumerate() {
        let comma = if place == 0 { "" } else { "," };
        let end = begin + tensor.bytes();
        // Names are our own and need no escapes. Writing to a string cannot fail.
        let _ = write!(
            json,
            "{comma}\"{}\":{{\"dtype\":\"{}\",\"shape\":[",
            tensor.name, tensor.dtype
        );
        for (place, dim) in tensor.shape.dims().iter().enumerate() {
            let _ = write!(json, "{}{dim}", if place == 0 { "" } else { "," });
        }
        let _ = write!(json, "],\"data_offsets\":[{begin},{end}]}}");
        begin = end;
    }
    json.push('}');
    while !json.len().is_multiple_of(HEADER_ALIGN) {
        json.push(' ');
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.into_bytes());
    bytes
}

//! One sequence's state: what it holds, and its way out and back, layer by layer.

use checkpoint::K3Config;
use kernels::{Backend, KdaState, KvFormat};
use std::io::{self, Read, Write};

/// One sequence's state: everything that later tokens need of earlier ones. A clone shares the latents that both have.
pub struct State<B: Backend> {
    pub(super) layers: Vec<LayerState<B>>,
    pub(super) positions: usize,
}

pub(super) enum LayerState<B: Backend> {
    Kda(B::Kda),
    Mla(B::Latents),
}

impl<B: Backend> Clone for State<B> {
    fn clone(&self) -> Self {
        let layers = self.layers.iter().map(|layer| match layer {
            LayerState::Kda(kda) => LayerState::Kda(kda.clone()),
            LayerState::Mla(latents) => LayerState::Mla(latents.clone()),
        });
        Self {
            layers: layers.collect(),
            positions: self.positions,
        }
    }
}

impl<B: Backend> State<B> {
    /// Tokens seen so far.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Writes one layer's state, [`saved_bytes`] bytes: see [`Backend::save_kda`] and [`Backend::save_latents`].
    pub fn save_layer(&self, be: &B, layer: usize, to: &mut dyn Write) -> io::Result<()> {
        match &self.layers[layer] {
            LayerState::Kda(kda) => be.save_kda(kda, to),
            LayerState::Mla(latents) => be.save_latents(latents, to),
        }
    }

    /// Sets one layer to what [`save_layer`](Self::save_layer) wrote after `positions` tokens. The state is of use when all
    /// layers have been set.
    pub fn load_layer(&mut self, be: &B, layer: usize, positions: usize, from: &mut dyn Read) -> io::Result<()> {
        self.positions = positions;
        match &mut self.layers[layer] {
            LayerState::Kda(kda) => be.load_kda(kda, from),
            LayerState::Mla(latents) => be.load_latents(latents, positions, from),
        }
    }
}

/// Bytes that [`State::save_layer`] writes for a layer after `positions` tokens.
pub fn saved_bytes(c: &K3Config, layer: usize, positions: usize, kv: KvFormat) -> u64 {
    let l = &c.linear_attn_config;
    match c.is_mla(layer) {
        true => positions as u64 * ((c.kv_lora_rank + c.qk_rope_head_dim) * kv.bytes()) as u64,
        false => KdaState::bytes(l.num_heads, l.head_dim, l.short_conv_kernel_size),
    }
}

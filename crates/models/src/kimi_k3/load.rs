//! From tensor names to layers.

use super::{Attention, FeedForward, Glu, Kda, Layer, Mla, Moe};
use crate::source::TensorSource;
use checkpoint::K3Config;
use kernels::Backend;

/// Takes tensors whose names begin with `prefix`.
pub(super) struct Loader<'a, B: Backend, S: TensorSource> {
    pub(super) be: &'a B,
    pub(super) source: &'a mut S,
    pub(super) prefix: String,
}

impl<B: Backend, S: TensorSource> Loader<'_, B, S> {
    fn numbers(&mut self, name: &str) -> Result<Vec<f32>, S::Error> {
        Ok(self.source.tensor(&format!("{}{name}", self.prefix))?.numbers())
    }

    /// A vector, `name` with its suffix, since not all vectors end in `.weight`.
    pub(super) fn vector(&mut self, name: &str) -> Result<B::Vector, S::Error> {
        Ok(self.be.vector(self.numbers(name)?))
    }

    /// A matrix `name.weight`.
    pub(super) fn linear(&mut self, name: &str) -> Result<B::Linear, S::Error> {
        let t = self.source.tensor(&format!("{}{name}.weight", self.prefix))?;
        let cols = t.shape.last().copied().unwrap_or(0);
        let rows = t.shape.iter().rev().skip(1).product();
        Ok(self.be.linear(rows, cols, t.format, t.data)?)
    }

    /// The score vector of an attention residual: norm weight times pseudo-query, in f32.
    pub(super) fn residual(&mut self, name: &str) -> Result<B::Vector, S::Error> {
        let norm = self.numbers(&format!("{name}_norm.weight"))?;
        let proj = self.numbers(&format!("{name}_proj.weight"))?;
        Ok(self.be.vector(norm.iter().zip(&proj).map(|(n, p)| n * p).collect()))
    }

    /// The taps of a convolution, from `[channels, 1, taps]` to `[taps, channels]`.
    fn conv(&mut self, name: &str, taps: usize) -> Result<B::Vector, S::Error> {
        let stored = self.numbers(&format!("{name}.weight"))?;
        let channels = stored.len() / taps;
        let turned = (0..taps)
            .flat_map(|t| (0..channels).map(move |c| (c, t)))
            .map(|(c, t)| stored[c * taps + t]);
        Ok(self.be.vector(turned.collect()))
    }

    fn glu(&mut self, name: &str) -> Result<Glu<B>, S::Error> {
        Ok(Glu {
            gate_proj: self.linear(&format!("{name}.gate_proj"))?,
            up_proj: self.linear(&format!("{name}.up_proj"))?,
            down_proj: self.linear(&format!("{name}.down_proj"))?,
        })
    }

    fn kda(&mut self, c: &K3Config) -> Result<Kda<B>, S::Error> {
        let l = &c.linear_attn_config;
        // One rate a head; the stored vector may be longer, filled up with zeros.
        let a_log = self.numbers("self_attn.A_log")?;
        let rate = a_log[..l.num_heads].iter().map(|&a| kernels::exp(a)).collect();
        let taps = l.short_conv_kernel_size;
        Ok(Kda {
            q_proj: self.linear("self_attn.q_proj")?,
            k_proj: self.linear("self_attn.k_proj")?,
            v_proj: self.linear("self_attn.v_proj")?,
            conv1d: [
                self.conv("self_attn.q_conv1d", taps)?,
                self.conv("self_attn.k_conv1d", taps)?,
                self.conv("self_attn.v_conv1d", taps)?,
            ],
            f_a_proj: self.linear("self_attn.f_a_proj")?,
            f_b_proj: self.linear("self_attn.f_b_proj")?,
            dt_bias: self.vector("self_attn.dt_bias")?,
            rate: self.be.vector(rate),
            b_proj: self.linear("self_attn.b_proj")?,
            o_norm: self.vector("self_attn.o_norm.weight")?,
            g_proj: self.linear("self_attn.g_proj")?,
            o_proj: self.linear("self_attn.o_proj")?,
        })
    }

    fn mla(&mut self) -> Result<Mla<B>, S::Error> {
        Ok(Mla {
            q_a_proj: self.linear("self_attn.q_a_proj")?,
            q_a_layernorm: self.vector("self_attn.q_a_layernorm.weight")?,
            q_b_proj: self.linear("self_attn.q_b_proj")?,
            kv_a_proj_with_mqa: self.linear("self_attn.kv_a_proj_with_mqa")?,
            kv_a_layernorm: self.vector("self_attn.kv_a_layernorm.weight")?,
            kv_b_proj: self.linear("self_attn.kv_b_proj")?,
            g_proj: self.linear("self_attn.g_proj")?,
            o_proj: self.linear("self_attn.o_proj")?,
        })
    }

    fn moe(&mut self) -> Result<Moe<B>, S::Error> {
        Ok(Moe {
            gate: self.linear("block_sparse_moe.gate")?,
            e_score_correction_bias: self.vector("block_sparse_moe.gate.e_score_correction_bias")?,
            routed_expert_down_proj: self.linear("block_sparse_moe.routed_expert_down_proj")?,
            routed_expert_norm: self.vector("block_sparse_moe.routed_expert_norm.weight")?,
            routed_expert_up_proj: self.linear("block_sparse_moe.routed_expert_up_proj")?,
            shared_experts: self.glu("block_sparse_moe.shared_experts")?,
        })
    }
}

impl<B: Backend> Layer<B> {
    pub(super) fn load<S: TensorSource>(be: &B, c: &K3Config, layer: usize, source: &mut S) -> Result<Self, S::Error> {
        let mut l = Loader {
            be,
            source,
            prefix: format!("model.layers.{layer}."),
        };
        Ok(Self {
            self_attention_res: l.residual("self_attention_res")?,
            input_layernorm: l.vector("input_layernorm.weight")?,
            self_attn: match c.is_mla(layer) {
                true => Attention::Mla(Box::new(l.mla()?)),
                false => Attention::Kda(Box::new(l.kda(c)?)),
            },
            mlp_res: l.residual("mlp_res")?,
            post_attention_layernorm: l.vector("post_attention_layernorm.weight")?,
            ffn: match c.is_moe(layer) {
                true => FeedForward::Moe(Box::new(l.moe()?)),
                false => FeedForward::Dense(l.glu("mlp")?),
            },
        })
    }
}

//! Kimi K3 a second time, for comparison: f64, straight from the formulas of the report, the whole sequence at once. No
//! cache, no absorbed form, no block, no thread; it shares with the engine only the reader of headers and configuration.
//!
//! It can be told to make one [`Mistake`], so that a test can show that its numbers would betray it.
#![allow(dead_code)] // each test file uses its part

mod weights;

use checkpoint::{Checkpoint, K3Config};
use std::collections::HashMap;
use weights::Tensor;

/// Ways to get Kimi K3 wrong that still give numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// `A_log` read by channel of a head instead of by head.
    DecayRatePerChannel,
    /// Log decay `max(bound, -exp(A_log) softplus(z))` instead of `bound * sigmoid(exp(A_log) z)`.
    ClampedSoftplusDecay,
    /// KDA's output gate in front of its norm.
    GateBeforeNorm,
    /// The attention residual mixes normed sources.
    ResidualValuesNormed,
    /// The attention residual's scores divided by the root of the width.
    ResidualScoresScaled,
    /// The embedding is no source of the attention residuals any more once the first block is finished.
    EmbeddingDropped,
    /// Residual blocks of four layers.
    BlocksOfFour,
    /// The odd column in the low nibble.
    NibblesSwapped,
    /// No norm after the weighted sum of experts.
    NoLatentNorm,
    /// Experts weighed with the biased scores that chose them.
    BiasedWeights,
    /// MLA scores scaled by the width without the shared channels.
    ScaleWithoutShared,
    /// `silu(gate) * up` for SiTU.
    Silu,
    /// The linear factor of SiTU not capped.
    UpNotCapped,
    /// SiTU's sigmoid of the capped gate.
    SigmoidOfCappedGate,
    /// The norms inside MLA with the other norms' epsilon, 1e-5.
    MlaEps,
    /// 1e-5 added to the sum of squares of a KDA query or key.
    L2Eps,
}

/// A vector for each position.
type Rows = Vec<Vec<f64>>;

/// All that one run shows.
#[derive(Default)]
pub struct Run {
    /// By position.
    pub logits: Rows,
    /// By layer and position: the running sum since the last block boundary.
    pub streams: Vec<Rows>,
    /// By layer and position: the chosen experts, ascending; none in a dense layer.
    pub routes: Vec<Vec<Vec<u32>>>,
    /// By layer and position: all experts in the order in which the router would prefer them if the layer's attention gave
    /// zero, with their biased scores; none in a dense layer.
    pub guesses: Vec<Vec<Vec<(u32, f64)>>>,
    /// The least distance, in all layers and positions, between the last chosen and the first refused biased score.
    pub router_margin: f64,
}

/// The model with its weights, and the mistake that it makes.
pub struct Plain {
    c: K3Config,
    tensors: HashMap<String, Tensor>,
    mistake: Option<Mistake>,
}

impl Plain {
    pub fn read(checkpoint: &Checkpoint, mistake: Option<Mistake>) -> Self {
        Self {
            c: checkpoint.config().clone(),
            tensors: weights::read_all(checkpoint, mistake == Some(Mistake::NibblesSwapped)),
            mistake,
        }
    }

    /// The same model with the matrices of an int8 trunk, as the numbers that their integers stand for.
    #[allow(dead_code)] // for the tests of the trunk
    pub fn in_int8(mut self) -> Self {
        let stays = |name: &str| {
            let kept = [
                "embed_tokens",
                "block_sparse_moe.gate.",
                "kv_b_proj",
                "experts.",
                "_res_proj",
                "conv1d",
            ];
            // Shared experts are trunk, streamed ones are not.
            kept.iter().any(|part| name.contains(part)) && !name.contains("shared_experts.")
        };
        for (name, tensor) in &mut self.tensors {
            if tensor.cols == tensor.data.len() || stays(name) {
                continue;
            }
            for row in tensor.data.chunks_exact_mut(tensor.cols) {
                let scale = row.iter().fold(0.0, |most: f32, w| most.max(w.abs() as f32)) / 127.0;
                for w in row.iter_mut().filter(|w| **w != 0.0) {
                    *w = (*w as f32 / scale).round_ties_even() as f64 * scale as f64;
                }
            }
        }
        self
    }

    fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn tensor(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    fn eps(&self) -> f64 {
        self.c.rms_norm_eps as f64
    }

    /// `W x` for each position.
    fn linear(&self, name: &str, x: &Rows) -> Rows {
        let w = self.tensor(&format!("{name}.weight"));
        x.iter().map(|x| w.times(x)).collect()
    }

    fn norm(&self, name: &str, x: &Rows, eps: f64) -> Rows {
        let w = &self.tensor(&format!("{name}.weight")).data;
        x.iter().map(|x| rms_norm(x, w, eps)).collect()
    }

    pub fn run(&self, ids: &[u32]) -> Run {
        let c = &self.c;
        let mut run = Run {
            router_margin: f64::INFINITY,
            ..Run::default()
        };
        let block = match self.makes(Mistake::BlocksOfFour) {
            true => 4,
            false => c.attn_res_block_size,
        };
        let embedding = self.tensor("model.embed_tokens.weight");
        let mut stream: Rows = ids.iter().map(|id| embedding.row(*id as usize).to_vec()).collect();
        let mut bank: Vec<Rows> = vec![];
        for layer in 0..c.num_hidden_layers {
            let at = format!("model.layers.{layer}");
            let is_moe = layer >= c.first_k_dense_replace && layer % c.moe_layer_freq == 0;
            run.guesses.push(match is_moe {
                true => self.guess(layer, bank.clone(), stream.clone(), layer % block == 0),
                false => vec![],
            });
            let h = match bank.is_empty() {
                true => stream.clone(),
                false => self.residual(&format!("{at}.self_attention_res"), &bank, &stream),
            };
            let x = self.norm(&format!("{at}.input_layernorm"), &h, self.eps());
            // The published list counts layers from 1.
            let a = match c.linear_attn_config.full_attn_layers.contains(&(layer + 1)) {
                true => self.mla(&format!("{at}.self_attn"), &x),
                false => self.kda(&format!("{at}.self_attn"), &x),
            };
            if layer % block == 0 {
                bank.push(stream);
                stream = a;
            } else {
                add(&mut stream, &a);
            }
            let h = self.residual(&format!("{at}.mlp_res"), &bank, &stream);
            let x = self.norm(&format!("{at}.post_attention_layernorm"), &h, self.eps());
            let mut routes = vec![];
            let f = match is_moe {
                true => self.moe(layer, &x, &mut routes, &mut run.router_margin),
                false => self.mlp(&format!("{at}.mlp"), &x),
            };
            add(&mut stream, &f);
            run.streams.push(stream.clone());
            run.routes.push(routes);
        }
        let h = self.residual("model.output_attn_res", &bank, &stream);
        run.logits = self.linear("lm_head", &self.norm("model.norm", &h, self.eps()));
        run
    }

    /// What the router of `layer` would prefer if its attention gave zero.
    fn guess(&self, layer: usize, mut bank: Vec<Rows>, mut stream: Rows, opens_block: bool) -> Vec<Vec<(u32, f64)>> {
        if opens_block {
            let zero = vec![vec![0.0; self.c.hidden_size]; stream.len()];
            bank.push(std::mem::replace(&mut stream, zero));
        }
        let at = format!("model.layers.{layer}");
        let h = self.residual(&format!("{at}.mlp_res"), &bank, &stream);
        let x = self.norm(&format!("{at}.post_attention_layernorm"), &h, self.eps());
        let bias = &self
            .tensor(&format!("{at}.block_sparse_moe.gate.e_score_correction_bias"))
            .data;
        let logits = self.linear(&format!("{at}.block_sparse_moe.gate"), &x);
        let prefer = |logits: &Vec<f64>| {
            let biased = router_scores(logits, bias).1;
            let order = preferred(&biased);
            order.into_iter().map(|e| (e as u32, biased[e])).collect()
        };
        logits.iter().map(prefer).collect()
    }

    /// Attention residual: the finished blocks and the stream, mixed by a softmax over the sources.
    fn residual(&self, name: &str, bank: &[Rows], stream: &Rows) -> Rows {
        let norm = &self.tensor(&format!("{name}_norm.weight")).data;
        let query = &self.tensor(&format!("{name}_proj.weight")).data;
        let skipped = usize::from(self.makes(Mistake::EmbeddingDropped) && bank.len() > 1);
        let mix = |t: usize| {
            let sources: Vec<&Vec<f64>> = bank[skipped..].iter().chain([stream]).map(|rows| &rows[t]).collect();
            let keys: Rows = sources.iter().map(|v| rms_norm(v, norm, self.eps())).collect();
            let scale = match self.makes(Mistake::ResidualScoresScaled) {
                true => (query.len() as f64).sqrt().recip(),
                false => 1.0,
            };
            let scores: Vec<f64> = keys.iter().map(|k| dot(k, query) * scale).collect();
            let ones = vec![1.0; query.len()];
            let mut mixed = vec![0.0; query.len()];
            for (p, v) in softmax(&scores).iter().zip(sources) {
                match self.makes(Mistake::ResidualValuesNormed) {
                    true => add_scaled(&mut mixed, *p, &rms_norm(v, &ones, self.eps())),
                    false => add_scaled(&mut mixed, *p, v),
                }
            }
            mixed
        };
        (0..stream.len()).map(mix).collect()
    }

    /// Kimi Delta Attention as its recurrence.
    fn kda(&self, at: &str, x: &Rows) -> Rows {
        let l = &self.c.linear_attn_config;
        let (heads, dim) = (l.num_heads, l.head_dim);
        let [q, k, v] = ["q", "k", "v"].map(|s| {
            let taps = self.tensor(&format!("{at}.{s}_conv1d.weight"));
            causal_conv(taps, &self.linear(&format!("{at}.{s}_proj"), x))
        });
        let z = self.linear(&format!("{at}.f_b_proj"), &self.linear(&format!("{at}.f_a_proj"), x));
        let beta = self.linear(&format!("{at}.b_proj"), x);
        let gate = self.linear(&format!("{at}.g_proj"), x);
        let a_log = &self.tensor(&format!("{at}.A_log")).data;
        let dt_bias = &self.tensor(&format!("{at}.dt_bias")).data;
        let o_norm = &self.tensor(&format!("{at}.o_norm.weight")).data;
        let l2_eps = if self.makes(Mistake::L2Eps) { 1e-5 } else { 1e-6 };
        let mut out = vec![vec![0.0; heads * dim]; x.len()];
        for head in 0..heads {
            let here = head * dim..(head + 1) * dim;
            let mut state = vec![vec![0.0; dim]; dim]; // [key][value]
            for t in 0..x.len() {
                let unit = |x: &[f64]| -> Vec<f64> {
                    let length = (dot(x, x) + l2_eps).sqrt();
                    x.iter().map(|x| x / length).collect()
                };
                let query = unit(&q[t][here.clone()]);
                let key = unit(&k[t][here.clone()]);
                for (i, row) in state.iter_mut().enumerate() {
                    let channel = head * dim + i;
                    let a = a_log[if self.makes(Mistake::DecayRatePerChannel) {
                        i
                    } else {
                        head
                    }];
                    let log_decay = self.log_decay(a.exp(), z[t][channel] + dt_bias[channel]);
                    row.iter_mut().for_each(|s| *s *= log_decay.exp());
                }
                let mut seen = vec![0.0; dim];
                for (row, k) in state.iter().zip(&key) {
                    add_scaled(&mut seen, *k, row);
                }
                let error: Vec<f64> = v[t][here.clone()].iter().zip(&seen).map(|(v, u)| v - u).collect();
                for (row, k) in state.iter_mut().zip(&key) {
                    add_scaled(row, k * sigmoid(beta[t][head]), &error);
                }
                let mut o = vec![0.0; dim];
                for (row, q) in state.iter().zip(&query) {
                    add_scaled(&mut o, q / (dim as f64).sqrt(), row);
                }
                let gate = gate[t][here.clone()].iter().map(|g| sigmoid(*g));
                let o: Vec<f64> = match self.makes(Mistake::GateBeforeNorm) {
                    true => rms_norm(
                        &o.iter().zip(gate).map(|(o, g)| o * g).collect::<Vec<_>>(),
                        o_norm,
                        self.eps(),
                    ),
                    false => rms_norm(&o, o_norm, self.eps())
                        .iter()
                        .zip(gate)
                        .map(|(o, g)| o * g)
                        .collect(),
                };
                out[t][here.clone()].copy_from_slice(&o);
            }
        }
        self.linear(&format!("{at}.o_proj"), &out)
    }

    fn log_decay(&self, rate: f64, z: f64) -> f64 {
        let bound = self.c.linear_attn_config.gate_lower_bound as f64;
        match self.makes(Mistake::ClampedSoftplusDecay) {
            true => (-rate * z.exp().ln_1p()).max(bound),
            false => bound * sigmoid(rate * z),
        }
    }

    /// Multi-head latent attention, expanded: keys and values of every head and position.
    fn mla(&self, at: &str, x: &Rows) -> Rows {
        let c = &self.c;
        let (heads, nope, shared) = (c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim);
        let eps = if self.makes(Mistake::MlaEps) { 1e-5 } else { 1e-6 };
        let q_a = self.norm(
            &format!("{at}.q_a_layernorm"),
            &self.linear(&format!("{at}.q_a_proj"), x),
            eps,
        );
        let q = self.linear(&format!("{at}.q_b_proj"), &q_a);
        let (latent, shared_key): (Rows, Rows) = self
            .linear(&format!("{at}.kv_a_proj_with_mqa"), x)
            .iter()
            .map(|kv| (kv[..c.kv_lora_rank].to_vec(), kv[c.kv_lora_rank..].to_vec()))
            .unzip();
        let latent = self.norm(&format!("{at}.kv_a_layernorm"), &latent, eps);
        let kv = self.linear(&format!("{at}.kv_b_proj"), &latent);
        let gate = self.linear(&format!("{at}.g_proj"), x);
        let scaled = if self.makes(Mistake::ScaleWithoutShared) {
            nope
        } else {
            nope + shared
        };
        let mut out = vec![vec![0.0; heads * c.v_head_dim]; x.len()];
        for head in 0..heads {
            let query = |t: usize| &q[t][head * (nope + shared)..][..nope + shared];
            let key_value = |s: usize| kv[s][head * (nope + c.v_head_dim)..][..nope + c.v_head_dim].split_at(nope);
            for (t, out) in out.iter_mut().enumerate() {
                let score = |s: usize| {
                    let (own, common) = query(t).split_at(nope);
                    (dot(own, key_value(s).0) + dot(common, &shared_key[s])) / (scaled as f64).sqrt()
                };
                let scores: Vec<f64> = (0..=t).map(score).collect();
                let o = &mut out[head * c.v_head_dim..][..c.v_head_dim];
                for (s, p) in softmax(&scores).iter().enumerate() {
                    add_scaled(o, *p, key_value(s).1);
                }
            }
        }
        for (o, g) in out.iter_mut().flatten().zip(gate.iter().flatten()) {
            *o *= sigmoid(*g);
        }
        self.linear(&format!("{at}.o_proj"), &out)
    }

    /// The latent mixture of experts.
    fn moe(&self, layer: usize, x: &Rows, routes: &mut Vec<Vec<u32>>, margin: &mut f64) -> Rows {
        let c = &self.c;
        let at = format!("model.layers.{layer}.block_sparse_moe");
        let bias = &self.tensor(&format!("{at}.gate.e_score_correction_bias")).data;
        let logits = self.linear(&format!("{at}.gate"), x);
        let z = self.linear(&format!("{at}.routed_expert_down_proj"), x);
        let mut y = vec![];
        for (logits, z) in logits.iter().zip(&z) {
            let (scores, biased) = router_scores(logits, bias);
            let mut order = preferred(&biased);
            if let [last, refused, ..] = order[c.num_experts_per_token - 1..] {
                *margin = margin.min(biased[last] - biased[refused]);
            }
            order.truncate(c.num_experts_per_token);
            let weigh = if self.makes(Mistake::BiasedWeights) {
                &biased
            } else {
                &scores
            };
            let sum: f64 = order.iter().map(|e| weigh[*e]).sum();
            let mut mixed = vec![0.0; c.routed_expert_hidden_size];
            for e in &order {
                let w = weigh[*e] / (sum + 1e-20) * c.routed_scaling_factor as f64;
                let [gate, down, up] =
                    ["w1", "w2", "w3"].map(|m| self.tensor(&format!("{at}.experts.{e}.{m}.weight_packed")));
                add_scaled(&mut mixed, w, &self.glu(gate, up, down, z));
            }
            y.push(mixed);
            order.sort_unstable();
            routes.push(order.iter().map(|e| *e as u32).collect());
        }
        if !self.makes(Mistake::NoLatentNorm) {
            y = self.norm(&format!("{at}.routed_expert_norm"), &y, self.eps());
        }
        let mut out = self.linear(&format!("{at}.routed_expert_up_proj"), &y);
        add(&mut out, &self.mlp(&format!("{at}.shared_experts"), x));
        out
    }

    fn mlp(&self, at: &str, x: &Rows) -> Rows {
        let [gate, up, down] = ["gate", "up", "down"].map(|m| self.tensor(&format!("{at}.{m}_proj.weight")));
        x.iter().map(|x| self.glu(gate, up, down, x)).collect()
    }

    fn glu(&self, gate: &Tensor, up: &Tensor, down: &Tensor, x: &[f64]) -> Vec<f64> {
        let inner = gate
            .times(x)
            .iter()
            .zip(up.times(x))
            .map(|(g, u)| self.situ(*g, u))
            .collect::<Vec<_>>();
        down.times(&inner)
    }

    fn situ(&self, gate: f64, up: f64) -> f64 {
        let (gate_cap, up_cap) = (
            self.c.activation_situ_beta as f64,
            self.c.activation_situ_linear_beta as f64,
        );
        let capped = gate_cap * (gate / gate_cap).tanh();
        match self.mistake {
            Some(Mistake::Silu) => gate * sigmoid(gate) * up,
            Some(Mistake::UpNotCapped) => capped * sigmoid(gate) * up,
            Some(Mistake::SigmoidOfCappedGate) => capped * sigmoid(capped) * up_cap * (up / up_cap).tanh(),
            _ => capped * sigmoid(gate) * up_cap * (up / up_cap).tanh(),
        }
    }
}

/// Scores and biased scores of all experts.
fn router_scores(logits: &[f64], bias: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let scores: Vec<f64> = logits.iter().map(|l| sigmoid(*l)).collect();
    let biased = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    (scores, biased)
}

/// Experts by falling score.
fn preferred(biased: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..biased.len()).collect();
    order.sort_by(|a, b| biased[*b].total_cmp(&biased[*a]));
    order
}

/// The last tap meets the newest input; SiLU at the end.
fn causal_conv(taps: &Tensor, x: &Rows) -> Rows {
    let value = |t: usize, channel: usize| {
        let taps = taps.row(channel);
        let newest = taps.len() - 1;
        let sum: f64 = (0..=newest.min(t))
            .map(|back| taps[newest - back] * x[t - back][channel])
            .sum();
        sum * sigmoid(sum)
    };
    (0..x.len())
        .map(|t| (0..x[t].len()).map(|channel| value(t, channel)).collect())
        .collect()
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut Rows, y: &Rows) {
    for (x, y) in x.iter_mut().zip(y) {
        add_scaled(x, 1.0, y);
    }
}

fn add_scaled(y: &mut [f64], a: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

fn rms_norm(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let rms = (dot(x, x) / x.len() as f64 + eps).sqrt();
    x.iter().zip(w).map(|(x, w)| x / rms * w).collect()
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|e| e / sum).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

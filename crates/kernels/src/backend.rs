use crate::format::{Matrix, ShapeError};
use crate::latents::KvFormat;
use std::io::{self, Read, Write};
use std::sync::Arc;

/// Weight bytes that stay where they were loaded.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// How a resident weight is stored. Experts are described by [`Matrix`] instead, since they come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// Little-endian bf16.
    Bf16,
    /// Little-endian f32.
    F32,
    /// Signed bytes, `rows * cols` of them, then one little-endian f32 scale a row. Not the published weights.
    Int8,
}

/// The rows of one sequence in a pass: `rows` consecutive rows from `first` on, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the first row.
    pub first: usize,
    /// Number of rows, at least one.
    pub rows: usize,
}

/// The experts that each row chose.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    /// Experts of a row.
    pub top_k: usize,
    /// `[rows, top_k]`: expert ids, ascending within a row.
    pub experts: Vec<u32>,
    /// `[rows, top_k]`: weight of each expert.
    pub weights: Vec<f32>,
}

impl Routes {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.experts.len().checked_div(self.top_k).unwrap_or(0)
    }

    /// Who wants which expert.
    pub fn demand(&self) -> Demand {
        let taker = |place| Taker {
            row: place / self.top_k,
            place,
        };
        let places = self.experts.iter().enumerate();
        let mut sorted: Vec<(u32, Taker)> = places.map(|(place, &expert)| (expert, taker(place))).collect();
        sorted.sort_by_key(|(expert, _)| *expert);
        let mut demand = Demand {
            experts: vec![],
            ends: vec![],
            takers: vec![],
        };
        for (expert, taker) in sorted {
            if demand.experts.last() != Some(&expert) {
                demand.experts.push(expert);
                demand.ends.push(demand.takers.len());
            }
            demand.takers.push(taker);
            *demand.ends.last_mut().expect("pushed with its expert") += 1;
        }
        demand
    }
}

/// Routes by expert: what a layer asks for, and for whom.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Demand {
    experts: Vec<u32>,
    /// Where the takers of each expert end.
    ends: Vec<usize>,
    takers: Vec<Taker>,
}

impl Demand {
    /// The union of all rows' experts, ascending.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// The rows that chose `expert`, ascending; none where no row did.
    pub fn takers(&self, expert: u32) -> &[Taker] {
        match self.experts.binary_search(&expert) {
            Ok(i) => &self.takers[i.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[i]],
            Err(_) => &[],
        }
    }
}

/// A row that an expert is computed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taker {
    /// Row of the pass.
    pub row: usize,
    /// Row of the results, `row * top_k + rank`.
    pub place: usize,
}

/// The three matrices of one routed expert, over the bytes as they landed.
#[derive(Clone, Copy, Debug)]
pub struct ExpertMatrices<'a> {
    /// `[inner, latent]`.
    pub gate: Matrix<'a>,
    /// `[inner, latent]`.
    pub up: Matrix<'a>,
    /// `[latent, inner]`.
    pub down: Matrix<'a>,
}

/// A routed expert and the rows it is computed for.
#[derive(Clone, Copy, Debug)]
pub struct ExpertWork<'a> {
    /// Its matrices.
    pub matrices: ExpertMatrices<'a>,
    /// Rows, and places of their results.
    pub takers: &'a [Taker],
}

/// Both caps of SiTU-GLU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SituCaps {
    /// Cap of the gate.
    pub beta: f32,
    /// Cap of the linear factor.
    pub linear_beta: f32,
}

/// Widths of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaShape {
    /// Number of heads.
    pub heads: usize,
    /// Query and key numbers of a head that go through the latent.
    pub nope: usize,
    /// Query and key numbers of a head that all heads share.
    pub shared: usize,
    /// Value numbers of a head.
    pub value: usize,
    /// Width of the latent.
    pub latent: usize,
}

/// The vocabulary of operations that models are written in. A back end owns activations, weights and state; a model passes
/// handles and never looks inside. Only routes and logits come out.
///
/// Every operation treats each row by itself: a row's result does not depend on the other rows, on their number, or on
/// how the work is split. Shapes are `[rows, width]`; an operation with outputs sets the rows of its output.
pub trait Backend {
    /// Activations `[rows, width]` of f32, with room for a fixed number of rows.
    type Act;
    /// A resident weight matrix `[out, in]`.
    type Linear;
    /// A resident weight vector of f32.
    type Vector;
    /// One sequence's state of one KDA layer: the last inputs of three convolutions and a `[keys, values]` matrix a head.
    type Kda: Clone;
    /// One sequence's latents of one MLA layer. A clone shares what both have.
    type Latents: Clone;

    /// Room for `capacity` rows of `width` numbers.
    fn act(&self, capacity: usize, width: usize) -> Self::Act;
    /// Takes a weight matrix as stored.
    fn linear(
        &self,
        rows: usize,
        cols: usize,
        format: WeightFormat,
        data: SharedBytes,
    ) -> Result<Self::Linear, ShapeError>;
    /// Takes a weight vector.
    fn vector(&self, data: Vec<f32>) -> Self::Vector;
    /// Zero state for `heads` heads of `dim` numbers and convolutions over `taps` inputs.
    fn kda(&self, heads: usize, dim: usize, taps: usize) -> Self::Kda;
    /// An empty cache of rows of `width` numbers, stored as `format`.
    fn latents(&self, width: usize, format: KvFormat) -> Self::Latents;
    /// Positions held by a cache.
    fn positions(&self, latents: &Self::Latents) -> usize;

    /// Writes a KDA state as little-endian f32: the matrices `[heads, keys, values]`, then the last inputs of the query, key
    /// and value convolutions, each `[taps - 1, heads * dim]`, oldest first.
    fn save_kda(&self, kda: &Self::Kda, to: &mut dyn Write) -> io::Result<()>;
    /// Sets a KDA state to what [`save_kda`](Self::save_kda) wrote of one of the same sizes.
    fn load_kda(&self, kda: &mut Self::Kda, from: &mut dyn Read) -> io::Result<()>;
    /// Writes a cache's rows, `[positions, width]`, as little-endian numbers of its format.
    fn save_latents(&self, latents: &Self::Latents, to: &mut dyn Write) -> io::Result<()>;
    /// Sets a cache to the `positions` rows that [`save_latents`](Self::save_latents) wrote.
    fn load_latents(&self, latents: &mut Self::Latents, positions: usize, from: &mut dyn Read) -> io::Result<()>;

    /// `x = data`, given as little-endian bf16 rows.
    fn upload_bf16(&self, data: &[u8], x: &mut Self::Act);
    /// The numbers of all rows.
    fn download(&self, x: &Self::Act) -> Vec<f32>;
    /// `y = x[rows]`.
    fn gather(&self, x: &Self::Act, rows: &[usize], y: &mut Self::Act);
    /// `y = x`.
    fn copy(&self, x: &Self::Act, y: &mut Self::Act);
    /// `x += y`.
    fn add(&self, x: &mut Self::Act, y: &Self::Act);

    /// `y = W x`.
    fn matmul(&self, w: &Self::Linear, x: &Self::Act, y: &mut Self::Act) {
        self.matmuls(&[w], x, &mut [y]);
    }
    /// `y[i] = W[i] x`, all at once.
    fn matmuls(&self, w: &[&Self::Linear], x: &Self::Act, y: &mut [&mut Self::Act]);
    /// `y = x / sqrt(mean(x^2) + eps) * w`.
    fn rms_norm(&self, x: &Self::Act, w: &Self::Vector, eps: f32, y: &mut Self::Act);
    /// Attention residual: softmax over sources of `<v, w> / rms(v)`, applied to the raw sources.
    fn mix(&self, sources: &[&Self::Act], w: &Self::Vector, eps: f32, y: &mut Self::Act);
    /// `gate = SiTU-GLU(gate, up)`.
    fn situ(&self, gate: &mut Self::Act, up: &Self::Act, caps: SituCaps);
    /// `x *= sigmoid(gate)`.
    fn gate(&self, x: &mut Self::Act, gate: &Self::Act);
    /// `x = sigmoid(x)`.
    fn sigmoid(&self, x: &mut Self::Act);

    /// Causal convolution over time and SiLU, in place, of queries, keys and values; keeps the last inputs in the states. `taps` are
    /// `[taps, channels]`. One state a span.
    fn conv(&self, x: [&mut Self::Act; 3], taps: [&Self::Vector; 3], spans: &[Span], states: &mut [&mut Self::Kda]);
    /// Divides each head of `dim` numbers by its length: `x / sqrt(sum(x^2) + eps) * scale`.
    fn head_l2_norm(&self, x: &mut Self::Act, dim: usize, eps: f32, scale: f32);
    /// `z = exp(bound * sigmoid(rate[head] * (z + bias)))`.
    fn decay(&self, z: &mut Self::Act, bias: &Self::Vector, rate: &Self::Vector, bound: f32);
    /// The delta rule, token by token. `beta` is `[rows, heads]`, the others `[rows, heads * dim]`. One state a span.
    #[allow(clippy::too_many_arguments)]
    fn delta(
        &self,
        query: &Self::Act,
        key: &Self::Act,
        value: &Self::Act,
        alpha: &Self::Act,
        beta: &Self::Act,
        spans: &[Span],
        states: &mut [&mut Self::Kda],
        y: &mut Self::Act,
    );
    /// `y = x / rms(x) * w * sigmoid(gate)`, each head of `w`'s width by itself.
    fn head_norm_gate(&self, x: &Self::Act, w: &Self::Vector, eps: f32, gate: &Self::Act, y: &mut Self::Act);

    /// Adds a position for each row: `[rms_norm(kv[..latent]) * w, kv[latent..]]`, rounded to the cache's format. One
    /// cache a span.
    fn append_latents(
        &self,
        kv: &Self::Act,
        w: &Self::Vector,
        eps: f32,
        spans: &[Span],
        caches: &mut [&mut Self::Latents],
    );
    /// Absorbs the key projection: per head `[W_k^T q[..nope], q[nope..]]`, `[rows, heads * (latent + shared)]`.
    fn absorb_query(&self, kv_b: &Self::Linear, q: &Self::Act, shape: MlaShape, y: &mut Self::Act);
    /// Causal attention of absorbed queries over the caches: weighted latents `[rows, heads * latent]`. The last row of a
    /// span is the newest position of its cache.
    fn attend(
        &self,
        q: &Self::Act,
        shape: MlaShape,
        scale: f32,
        spans: &[Span],
        caches: &[&Self::Latents],
        y: &mut Self::Act,
    );
    /// Values from weighted latents: per head `W_v x`, `[rows, heads * value]`.
    fn expand_values(&self, kv_b: &Self::Linear, x: &Self::Act, shape: MlaShape, y: &mut Self::Act);

    /// Chooses experts: scores `s = sigmoid(logits)`, the `top_k` largest `s + bias`, ties to the lower id; weights
    /// `s / (sum of chosen s + 1e-20) * scale`.
    fn route(&self, logits: &Self::Act, bias: &Self::Vector, top_k: usize, scale: f32) -> Routes;
    /// Runs experts for their takers: `results[place] = W_down SiTU-GLU(W_gate x[row], W_up x[row])`. No two takers have the same
    /// place.
    fn experts(&self, work: &[ExpertWork], caps: SituCaps, x: &Self::Act, results: &mut Self::Act);
    /// `y[row] = sum of weights * results`, experts ascending.
    fn combine(&self, routes: &Routes, results: &Self::Act, y: &mut Self::Act);
}

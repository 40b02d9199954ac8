//! The back end on the processor: plain slices, split over output rows, rows or heads by a thread pool.

mod attention;
mod experts;

pub use experts::ROWS_OF_A_THREAD;

use crate::aligned::Aligned;
use crate::backend::{Backend, ExpertWork, MlaShape, Routes, SharedBytes, SituCaps, Span, WeightFormat};
use crate::bytes;
use crate::format::{BLOCK, Elements, Matrix, ShapeError, bf16_to_f32};
use crate::isa::Isa;
use crate::latents::{KvFormat, Latents};
use crate::matmul::{Output, Packed, matmul};
use crate::vector;
use rayon::prelude::*;
use std::cell::Cell;
use std::io::{self, Read, Write};
use std::ops::Range;

/// Outputs that one task of a matrix product takes at least; keeps tasks above the cost of handing them out.
const TASK_OUTPUTS: usize = 32;
/// Weights that one task takes at least, for the same reason.
const TASK_WEIGHTS: usize = 1 << 15;

/// Tasks a thread of one operation: several, since threads do not begin together.
const TASKS_A_THREAD: usize = 4;
/// Numbers to arrange or move from which on the threads share them.
const TASK_NUMBERS: usize = 1 << 16;

thread_local! {
    /// A calling thread's arranged activations, kept from product to product.
    static PACKED: Cell<Packed> = Cell::default();
}

/// Runs `task` with the thread's arranged activations, whose former content is of no use.
fn with_packed<R>(task: impl FnOnce(&mut Packed) -> R) -> R {
    let mut packed = PACKED.take();
    let result = task(&mut packed);
    PACKED.set(packed);
    result
}

/// The CPU back end.
#[derive(Debug)]
pub struct Cpu {
    isa: Isa,
    threads: usize,
    pool: Option<rayon::ThreadPool>,
}

/// No thread could be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} compute threads: {reason}; ask for fewer with --threads")]
pub struct ThreadsError {
    threads: usize,
    reason: String,
}

impl Cpu {
    /// A back end that uses `isa` on `threads` threads, of which there is at least one.
    ///
    /// The calling thread is one of them, so that it takes part in what it calls instead of being put to sleep and woken for each
    /// operation; a thread can be that once, and rayon keeps some 10 KB for it for ever. Where it already was, all threads are new ones.
    ///
    /// # Panics
    /// If this processor does not run `isa`.
    pub fn new(isa: Isa, threads: usize) -> Result<Self, ThreadsError> {
        isa.assert_available();
        let threads = threads.max(1);
        let pool = match threads {
            1 => None,
            _ => {
                let builder = || {
                    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
                    builder.thread_name(|i| format!("compute-{i}"))
                };
                let pool = builder().use_current_thread().build().or_else(|_| builder().build());
                Some(pool.map_err(|e| ThreadsError {
                    threads,
                    reason: e.to_string(),
                })?)
            }
        };
        Ok(Self { isa, threads, pool })
    }

    /// The kernels in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Number of compute threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `task` for each item, on the pool where there is one.
    fn each<T: Send>(&self, items: Vec<T>, task: impl Fn(T) + Sync + Send) {
        match &self.pool {
            Some(pool) if items.len() > 1 => pool.install(|| items.into_par_iter().for_each(task)),
            _ => items.into_iter().for_each(task),
        }
    }

    /// Runs `task(index)` for `0..n`.
    fn each_index(&self, n: usize, task: impl Fn(usize) + Sync + Send) {
        match &self.pool {
            Some(pool) if n > 1 => pool.install(|| (0..n).into_par_iter().for_each(task)),
            _ => (0..n).for_each(task),
        }
    }

    /// Runs `task(i, row of x, row of y)` for every row, where `y` takes the rows of `x`.
    fn each_row(&self, x: &Rows, y: &mut Rows, task: impl Fn(usize, &[f32], &mut [f32]) + Sync + Send) {
        y.resize(x.rows);
        let width = y.width;
        let rows = y.data_mut();
        match &self.pool {
            Some(pool) if x.rows > 1 => pool.install(|| {
                rows.par_chunks_exact_mut(width)
                    .enumerate()
                    .for_each(|(i, y)| task(i, x.row(i), y));
            }),
            _ => rows
                .chunks_exact_mut(width)
                .enumerate()
                .for_each(|(i, y)| task(i, x.row(i), y)),
        }
    }

    /// Runs `task(i, row)` for every row of `x`.
    fn each_row_mut(&self, x: &mut Rows, task: impl Fn(usize, &mut [f32]) + Sync + Send) {
        let width = x.width;
        match &self.pool {
            Some(pool) if x.rows > 1 => pool.install(|| {
                x.data_mut()
                    .par_chunks_exact_mut(width)
                    .enumerate()
                    .for_each(|(i, row)| task(i, row));
            }),
            _ => x
                .data_mut()
                .chunks_exact_mut(width)
                .enumerate()
                .for_each(|(i, row)| task(i, row)),
        }
    }

    /// Arranges rows for a product; `row(i)` gives the i-th.
    fn pack<'a>(&self, packed: &mut Packed, rows: usize, cols: usize, row: impl Fn(usize) -> &'a [f32] + Sync + Send) {
        if rows * cols < TASK_NUMBERS {
            return packed.pack(rows, cols, row);
        }
        let slots = packed.resize(rows, cols);
        // SAFETY: each task fills a row of its own.
        self.each_index(rows, |i| unsafe { slots.fill(i, 0, &row(i)[..cols]) });
    }

    /// Splits the outputs of matrices, given as `[outputs, columns]`, into ranges that begin at multiples of [`BLOCK`], some `parts`
    /// of about the same work in all, and runs `task(matrix, range)` for each.
    fn split(&self, parts: usize, shapes: &[[usize; 2]], task: impl Fn(usize, Range<usize>) + Sync + Send) {
        let weights: usize = shapes.iter().map(|[outputs, cols]| outputs * cols).sum();
        let least = TASK_WEIGHTS.max(weights / parts);
        let mut tasks = vec![];
        for (matrix, &[outputs, cols]) in shapes.iter().enumerate() {
            let step = TASK_OUTPUTS
                .max(least / cols.max(1))
                .min(outputs.max(1))
                .next_multiple_of(BLOCK);
            tasks.extend(
                (0..outputs)
                    .step_by(step)
                    .map(|from| (matrix, from..outputs.min(from + step))),
            );
        }
        self.each(tasks, |(matrix, outputs)| task(matrix, outputs));
    }

    /// Parts into which one operation is split.
    fn parts(&self) -> usize {
        self.threads * TASKS_A_THREAD
    }
}

/// Activations of the CPU back end: a row-major `[rows, width]` slice with room for a fixed number of rows.
#[derive(Clone, Debug)]
pub struct Rows {
    width: usize,
    rows: usize,
    capacity: usize,
    data: Aligned<f32>,
}

impl Rows {
    fn new(capacity: usize, width: usize) -> Self {
        Self {
            width,
            rows: 0,
            capacity,
            data: Aligned::zeros(capacity * width),
        }
    }

    fn resize(&mut self, rows: usize) {
        assert!(
            rows <= self.capacity,
            "{rows} rows where {} were reserved",
            self.capacity
        );
        self.rows = rows;
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.data[..self.rows * self.width][i * self.width..][..self.width]
    }

    fn data(&self) -> &[f32] {
        &self.data[..self.rows * self.width]
    }

    fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.rows * self.width]
    }
}

/// A resident weight matrix of the CPU back end, as stored.
pub struct Weights {
    rows: usize,
    cols: usize,
    format: WeightFormat,
    data: SharedBytes,
}

impl Weights {
    fn bytes(&self) -> &[u8] {
        (*self.data).as_ref()
    }

    fn elements(&self) -> Elements<'_> {
        match self.format {
            WeightFormat::Bf16 => Elements::Bf16(self.bytes()),
            WeightFormat::F32 => Elements::F32(self.bytes()),
            WeightFormat::Int8 => {
                let (data, scale) = self.bytes().split_at((self.rows * self.cols).min(self.bytes().len()));
                Elements::Int8 { data, scale }
            }
        }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(self.rows, self.cols, self.elements()).expect("checked when the weight was taken")
    }
}

/// One sequence's state of one KDA layer.
#[derive(Clone, Debug)]
pub struct KdaState {
    heads: usize,
    dim: usize,
    taps: usize,
    /// `[heads][keys][values]`.
    matrix: Aligned<f32>,
    /// For each stream the last `taps - 1` inputs, oldest first.
    inputs: [Vec<f32>; 3],
}

impl KdaState {
    /// Bytes of one state.
    pub fn bytes(heads: usize, dim: usize, taps: usize) -> u64 {
        4 * (heads * dim * dim + 3 * (taps - 1) * heads * dim) as u64
    }
}

impl Backend for Cpu {
    type Act = Rows;
    type Linear = Weights;
    type Vector = Vec<f32>;
    type Kda = KdaState;
    type Latents = Latents;

    fn act(&self, capacity: usize, width: usize) -> Rows {
        Rows::new(capacity, width)
    }

    fn linear(&self, rows: usize, cols: usize, format: WeightFormat, data: SharedBytes) -> Result<Weights, ShapeError> {
        let w = Weights {
            rows,
            cols,
            format,
            data,
        };
        Matrix::new(rows, cols, w.elements())?;
        Ok(w)
    }

    fn vector(&self, data: Vec<f32>) -> Vec<f32> {
        data
    }

    fn kda(&self, heads: usize, dim: usize, taps: usize) -> KdaState {
        let inputs = std::array::from_fn(|_| vec![0.0; (taps - 1) * heads * dim]);
        KdaState {
            heads,
            dim,
            taps,
            matrix: Aligned::zeros(heads * dim * dim),
            inputs,
        }
    }

    fn latents(&self, width: usize, format: KvFormat) -> Latents {
        Latents::new(width, format)
    }

    fn positions(&self, latents: &Latents) -> usize {
        latents.len()
    }

    fn save_kda(&self, kda: &KdaState, to: &mut dyn Write) -> io::Result<()> {
        bytes::write(&kda.matrix, f32::to_le_bytes, to)?;
        let mut inputs = kda.inputs.iter();
        inputs.try_for_each(|part| bytes::write(part, f32::to_le_bytes, to))
    }

    fn load_kda(&self, kda: &mut KdaState, from: &mut dyn Read) -> io::Result<()> {
        bytes::read(&mut kda.matrix, f32::from_le_bytes, from)?;
        let mut inputs = kda.inputs.iter_mut();
        inputs.try_for_each(|part| bytes::read(part, f32::from_le_bytes, from))
    }

    fn save_latents(&self, latents: &Latents, to: &mut dyn Write) -> io::Result<()> {
        latents.save(to)
    }

    fn load_latents(&self, latents: &mut Latents, positions: usize, from: &mut dyn Read) -> io::Result<()> {
        latents.load(positions, from)
    }

    fn upload_bf16(&self, data: &[u8], x: &mut Rows) {
        x.resize(data.len() / 2 / x.width);
        for (x, b) in x.data_mut().iter_mut().zip(data.as_chunks::<2>().0) {
            *x = bf16_to_f32(u16::from_le_bytes(*b));
        }
    }

    fn download(&self, x: &Rows) -> Vec<f32> {
        x.data().to_vec()
    }

    fn gather(&self, x: &Rows, rows: &[usize], y: &mut Rows) {
        y.resize(rows.len());
        for (y, &i) in y.data_mut().chunks_exact_mut(x.width).zip(rows) {
            y.copy_from_slice(x.row(i));
        }
    }

    fn copy(&self, x: &Rows, y: &mut Rows) {
        y.resize(x.rows);
        y.data_mut().copy_from_slice(x.data());
    }

    fn add(&self, x: &mut Rows, y: &Rows) {
        assert_eq!((x.rows, x.width), (y.rows, y.width));
        // SAFETY: `new` checked the form.
        self.each_row_mut(x, |i, x| unsafe { vector::add(self.isa, x, y.row(i)) });
    }

    fn matmuls(&self, w: &[&Weights], x: &Rows, y: &mut [&mut Rows]) {
        assert_eq!(w.len(), y.len());
        let shapes: Vec<_> = w.iter().map(|w| [w.rows, w.cols]).collect();
        let products = w.iter().zip(y).map(|(w, y)| {
            assert_eq!(y.width, w.rows);
            y.resize(x.rows);
            (w.matrix(), Output::new(y.data_mut(), x.rows, w.rows))
        });
        let products: Vec<_> = products.collect();
        with_packed(|packed| {
            self.pack(packed, x.rows, x.width, |i| x.row(i));
            self.split(self.parts(), &shapes, |i, outputs| {
                let (w, y) = &products[i];
                // SAFETY: `new` checked the form; `y` is borrowed for the call and covers every output; the ranges of
                // different tasks do not meet.
                unsafe { matmul(self.isa, w, outputs, packed, *y) }
            });
        });
    }

    fn rms_norm(&self, x: &Rows, w: &Vec<f32>, eps: f32, y: &mut Rows) {
        // SAFETY: `new` checked the form.
        self.each_row(x, y, |_, x, y| unsafe { vector::rms_norm(self.isa, x, w, eps, y) });
    }

    fn mix(&self, sources: &[&Rows], w: &Vec<f32>, eps: f32, y: &mut Rows) {
        assert!(
            (1..=vector::MAX_SOURCES).contains(&sources.len()),
            "{} sources of a residual mix",
            sources.len()
        );
        self.each_row(sources[0], y, |i, _, y| {
            let mut rows: [&[f32]; vector::MAX_SOURCES] = [&[]; vector::MAX_SOURCES];
            rows.iter_mut()
                .zip(sources)
                .for_each(|(row, source)| *row = source.row(i));
            // SAFETY: `new` checked the form.
            unsafe { vector::mix(self.isa, &rows[..sources.len()], w, eps, y) }
        });
    }

    fn situ(&self, gate: &mut Rows, up: &Rows, caps: SituCaps) {
        self.each_row_mut(gate, |i, gate| {
            // SAFETY: `new` checked the form.
            unsafe { vector::situ(self.isa, gate, up.row(i), caps.beta, caps.linear_beta) }
        });
    }

    fn gate(&self, x: &mut Rows, gate: &Rows) {
        // SAFETY: `new` checked the form.
        self.each_row_mut(x, |i, x| unsafe { vector::gate(self.isa, x, gate.row(i)) });
    }

    fn sigmoid(&self, x: &mut Rows) {
        // SAFETY: `new` checked the form.
        self.each_row_mut(x, |_, x| unsafe { vector::sigmoid_all(self.isa, x) });
    }

    fn conv(&self, x: [&mut Rows; 3], taps: [&Vec<f32>; 3], spans: &[Span], states: &mut [&mut KdaState]) {
        self.conv_rows(x, taps, spans, states);
    }

    fn head_l2_norm(&self, x: &mut Rows, dim: usize, eps: f32, scale: f32) {
        // SAFETY: `new` checked the form.
        self.each_row_mut(x, |_, x| unsafe { vector::head_l2_norm(self.isa, x, dim, eps, scale) });
    }

    fn decay(&self, z: &mut Rows, bias: &Vec<f32>, rate: &Vec<f32>, bound: f32) {
        // SAFETY: `new` checked the form.
        self.each_row_mut(z, |_, z| unsafe { crate::kda::decay(self.isa, z, bias, rate, bound) });
    }

    fn delta(
        &self,
        query: &Rows,
        key: &Rows,
        value: &Rows,
        alpha: &Rows,
        beta: &Rows,
        spans: &[Span],
        states: &mut [&mut KdaState],
        y: &mut Rows,
    ) {
        self.delta_rows([query, key, value, alpha], beta, spans, states, y);
    }

    fn head_norm_gate(&self, x: &Rows, w: &Vec<f32>, eps: f32, gate: &Rows, y: &mut Rows) {
        self.each_row(x, y, |i, x, y| {
            // SAFETY: `new` checked the form.
            unsafe { vector::head_norm_gate(self.isa, x, w, eps, gate.row(i), y) }
        });
    }

    fn append_latents(&self, kv: &Rows, w: &Vec<f32>, eps: f32, spans: &[Span], caches: &mut [&mut Latents]) {
        for (span, cache) in spans.iter().zip(caches) {
            for i in span.first..span.first + span.rows {
                let row = kv.row(i);
                cache.push(|new| {
                    let (latent, shared) = new.split_at_mut(w.len());
                    // SAFETY: `new` checked the form.
                    unsafe { vector::rms_norm(self.isa, &row[..w.len()], w, eps, latent) };
                    shared.copy_from_slice(&row[w.len()..]);
                });
            }
        }
    }

    fn absorb_query(&self, kv_b: &Weights, q: &Rows, shape: MlaShape, y: &mut Rows) {
        self.absorb_rows(kv_b, q, shape, y);
    }

    fn attend(&self, q: &Rows, shape: MlaShape, scale: f32, spans: &[Span], caches: &[&Latents], y: &mut Rows) {
        self.attend_rows(q, shape, scale, spans, caches, y);
    }

    fn expand_values(&self, kv_b: &Weights, x: &Rows, shape: MlaShape, y: &mut Rows) {
        self.expand_rows(kv_b, x, shape, y);
    }

    fn route(&self, logits: &Rows, bias: &Vec<f32>, top_k: usize, scale: f32) -> Routes {
        self.route_rows(logits, bias, top_k, scale)
    }

    fn experts(&self, work: &[ExpertWork], caps: SituCaps, x: &Rows, results: &mut Rows) {
        self.expert_rows(work, caps, x, results);
    }

    fn combine(&self, routes: &Routes, results: &Rows, y: &mut Rows) {
        y.resize(routes.rows());
        self.each_row_mut(y, |i, y| {
            y.fill(0.0);
            for place in i * routes.top_k..(i + 1) * routes.top_k {
                // SAFETY: `new` checked the form.
                unsafe { vector::add_scaled(self.isa, y, routes.weights[place], results.row(place)) }
            }
        });
    }
}

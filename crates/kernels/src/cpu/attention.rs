use super::{Cpu, KdaState, Rows, Weights};
use crate::aligned::Aligned;
use crate::backend::{MlaShape, Span, WeightFormat};
use crate::isa::Isa;
use crate::kda::{self, Step};
use crate::latents::Latents;
use crate::matmul::{LANES, Output, Packed, matmul};
use crate::mla::{self, Softmax};
use std::cell::Cell;
use std::ops::Range;

thread_local! {
    /// A thread's room for a block of latents as f32, kept from task to task.
    static EXPANDED: Cell<Aligned<f32>> = Cell::default();
}

/// A row's place: which span, and which row of the span.
fn places(spans: &[Span], rows: usize) -> Vec<(usize, usize)> {
    let mut places = vec![(usize::MAX, 0); rows];
    for (s, span) in spans.iter().enumerate() {
        for i in 0..span.rows {
            places[span.first + i] = (s, i);
        }
    }
    assert!(
        places.iter().all(|(s, _)| *s != usize::MAX),
        "the spans do not cover all rows"
    );
    places
}

/// Channels that one task of a convolution takes at least.
const TASK_CHANNELS: usize = 1 << 10;

/// Convolution and SiLU of some channels of one span, in place; `y` has room for a row of them.
///
/// # Safety
/// The processor runs `isa`. Nobody else touches these channels of the span's rows of `x` or of `kept`, the inputs before them.
unsafe fn conv_span(
    isa: Isa,
    taps: &[&[f32]],
    x: Output,
    span: Span,
    kept: Output,
    channels: &Range<usize>,
    y: &mut [f32],
) {
    let before = taps.len() - 1;
    // The i-th row of a span sees the last inputs of the state first, then the rows of the span.
    // SAFETY: the caller's promise.
    let input = |i: usize| unsafe {
        match i.checked_sub(before) {
            Some(inside) => x.row(span.first + inside, channels),
            None => kept.row(i, channels),
        }
    };
    let newest: Vec<f32> = (span.rows..span.rows + before).flat_map(&input).copied().collect();
    // The last row first: nothing that is still to be read is overwritten.
    for i in (0..span.rows).rev() {
        let inputs: Vec<&[f32]> = (i..=i + before).map(&input).collect();
        // SAFETY: the caller's promise; the references to the row have ended when it is written.
        unsafe {
            kda::conv_silu(isa, taps, &inputs, y);
            drop(inputs);
            x.row_mut(span.first + i, channels).copy_from_slice(y);
        }
    }
    for (i, newest) in newest.chunks_exact(channels.len()).enumerate() {
        // SAFETY: as above.
        unsafe { kept.row_mut(i, channels).copy_from_slice(newest) }
    }
}

/// How many heads of a row an attention task takes: of all splits into equal tasks the one whose busiest thread has least to
/// do, and among equals the one with the largest tasks. Heads come in the multiples that the kernel likes.
fn heads_of_task(rows: usize, heads: usize, threads: usize) -> usize {
    let all = heads.div_ceil(mla::HEADS);
    let busiest = |units: &usize| (rows * all.div_ceil(*units)).div_ceil(threads) * units;
    (1..=all).rev().min_by_key(busiest).unwrap_or(1) * mla::HEADS
}

impl Cpu {
    pub(super) fn conv_rows(
        &self,
        x: [&mut Rows; 3],
        taps: [&Vec<f32>; 3],
        spans: &[Span],
        states: &mut [&mut KdaState],
    ) {
        let Some(first) = states.first() else { return };
        let (width, before) = (first.heads * first.dim, first.taps - 1);
        let rows = x[0].rows;
        places(spans, rows);
        assert!(
            taps.iter().all(|taps| taps.len() == (before + 1) * width)
                && x.iter().all(|x| x.rows == rows && x.width == width)
        );
        let x = x.map(|x| Output::new(x.data_mut(), rows, width));
        let kept: Vec<[Output; 3]> = states
            .iter_mut()
            .map(|state| {
                assert_eq!((state.heads * state.dim, state.taps - 1), (width, before));
                state.inputs.each_mut().map(|inputs| Output::new(inputs, before, width))
            })
            .collect();
        let step = (3 * width / self.parts()).max(TASK_CHANNELS).next_multiple_of(LANES);
        let starts = (0..width).step_by(step);
        let work = (0..3).flat_map(|stream| starts.clone().map(move |from| (stream, from..width.min(from + step))));
        self.each(work.collect(), |(stream, channels)| {
            let taps: Vec<&[f32]> = taps[stream]
                .chunks_exact(width)
                .map(|tap| &tap[channels.clone()])
                .collect();
            let mut y = vec![0.0; channels.len()];
            for (span, kept) in spans.iter().zip(&kept) {
                // SAFETY: this task alone touches these channels of this stream; no reference outlives its statement.
                unsafe { conv_span(self.isa, &taps, x[stream], *span, kept[stream], &channels, &mut y) }
            }
        });
    }

    /// `inputs`: query, key, value, alpha.
    pub(super) fn delta_rows(
        &self,
        inputs: [&Rows; 4],
        beta: &Rows,
        spans: &[Span],
        states: &mut [&mut KdaState],
        y: &mut Rows,
    ) {
        let rows = inputs[0].rows;
        y.resize(rows);
        let Some(first) = states.first() else { return };
        let (heads, dim) = (first.heads, first.dim);
        let out = Output::new(y.data_mut(), rows, heads * dim);
        let work: Vec<(Span, usize, &mut [f32])> = spans
            .iter()
            .zip(states)
            .flat_map(|(span, state)| {
                assert_eq!((state.heads, state.dim, state.taps > 0), (heads, dim, true));
                state
                    .matrix
                    .chunks_exact_mut(dim * dim)
                    .enumerate()
                    .map(|(head, matrix)| (*span, head, matrix))
            })
            .collect();
        self.each(work, |(span, head, matrix)| {
            let mut steps: Vec<Step> = (span.first..span.first + span.rows)
                .map(|row| {
                    let [query, key, value, alpha] = inputs.map(|x| &x.row(row)[head * dim..][..dim]);
                    Step {
                        query,
                        key,
                        alpha,
                        value,
                        beta: beta.row(row)[head],
                        // SAFETY: this task alone writes this head of this span's rows.
                        out: unsafe { out.row_mut(row, &(head * dim..(head + 1) * dim)) },
                    }
                })
                .collect();
            // SAFETY: `new` checked the form.
            unsafe { kda::delta(self.isa, matrix, &mut steps) }
        });
    }

    pub(super) fn absorb_rows(&self, kv_b: &Weights, q: &Rows, shape: MlaShape, y: &mut Rows) {
        assert_eq!(kv_b.format, WeightFormat::Bf16, "kv_b is published as bf16");
        let (query, full) = (shape.nope + shape.shared, shape.latent + shape.shared);
        let row_bytes = shape.latent * 2;
        y.resize(q.rows);
        assert_eq!((q.width, y.width), (shape.heads * query, shape.heads * full));
        let rows = y.data_mut().chunks_exact_mut(full).enumerate();
        self.each(rows.collect(), |(i, y)| {
            let (row, head) = (i / shape.heads, i % shape.heads);
            let q = &q.row(row)[head * query..][..query];
            let first = head * (shape.nope + shape.value);
            let w = &kv_b.bytes()[first * row_bytes..(first + shape.nope) * row_bytes];
            let (absorbed, shared) = y.split_at_mut(shape.latent);
            // SAFETY: `new` checked the form.
            unsafe { mla::transposed(self.isa, w, &q[..shape.nope], absorbed) };
            shared.copy_from_slice(&q[shape.nope..]);
        });
    }

    pub(super) fn attend_rows(
        &self,
        q: &Rows,
        shape: MlaShape,
        scale: f32,
        spans: &[Span],
        caches: &[&Latents],
        y: &mut Rows,
    ) {
        y.resize(q.rows);
        let places = places(spans, q.rows);
        let full = shape.latent + shape.shared;
        // A task takes a group of heads of one row through all blocks, so that a block is read once for the group.
        let positions: Vec<usize> = places
            .iter()
            .map(|&(s, inside)| caches[s].len() - spans[s].rows + inside + 1)
            .collect();
        // Rows with few positions count as parts of a row.
        let longest = positions.iter().copied().max().unwrap_or(1);
        let rows = positions.iter().sum::<usize>().div_ceil(longest);
        let group = heads_of_task(rows, shape.heads, self.threads);
        let work = y
            .data_mut()
            .chunks_exact_mut(shape.heads * shape.latent)
            .enumerate()
            .flat_map(|(row, out)| {
                let heads = out.chunks_mut(group * shape.latent).enumerate();
                heads.map(move |(g, out)| (row, g * group, out))
            })
            .collect();
        self.each(work, |(row, first, out)| {
            let heads = out.len() / shape.latent;
            let queries = &q.row(row)[first * full..(first + heads) * full];
            let mut softmax = vec![Softmax::new(); heads];
            out.fill(0.0);
            let mut room = EXPANDED.take();
            let mut blocks = caches[places[row].0].blocks(positions[row]).peekable();
            while let Some(block) = blocks.next() {
                let ahead = blocks.peek().map_or(&[][..], |next| next.bytes());
                // SAFETY: `new` checked the form.
                unsafe {
                    let block = block.as_f32(self.isa, &mut room);
                    mla::attend_block(self.isa, &mut softmax, queries, full, block, ahead, scale, out)
                };
            }
            EXPANDED.set(room);
            for (softmax, out) in softmax.iter().zip(out.chunks_exact_mut(shape.latent)) {
                // SAFETY: `new` checked the form.
                unsafe { mla::finish(self.isa, softmax, out) };
            }
        });
    }

    pub(super) fn expand_rows(&self, kv_b: &Weights, x: &Rows, shape: MlaShape, y: &mut Rows) {
        y.resize(x.rows);
        let width = y.width;
        assert_eq!(width, shape.heads * shape.value);
        let rows = x.rows;
        let out = Output::new(y.data_mut(), rows, width);
        self.each_index(shape.heads, |head| {
            let first = head * (shape.nope + shape.value) + shape.nope;
            let w = kv_b.matrix().slice(first..first + shape.value);
            let mut packed = Packed::default();
            packed.pack(rows, shape.latent, |i| &x.row(i)[head * shape.latent..][..shape.latent]);
            // SAFETY: `new` checked the form; the outputs of this head belong to this task alone.
            unsafe { matmul(self.isa, &w, 0..shape.value, &packed, out.from(head * shape.value)) }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_split_so_that_no_thread_waits_long() {
        // One row: all threads, as long as there are heads. Many rows: none is split.
        assert_eq!(
            [1, 2, 4, 8, 16].map(|threads| heads_of_task(1, 96, threads)),
            [96, 48, 24, 12, 6]
        );
        assert_eq!(heads_of_task(64, 96, 2), 96);
        // Three rows on two threads: six halves, three each.
        assert_eq!(heads_of_task(3, 96, 2), 48);
        // Fewer heads than a tile has, and more threads than heads.
        assert_eq!(heads_of_task(1, 2, 16), mla::HEADS);
        assert_eq!(heads_of_task(0, 96, 2), 96);
    }
}

use super::{Cpu, KdaState, Rows, Weights};
use crate::backend::{MlaShape, Span, WeightFormat};
use crate::kda::{self, Step};
use crate::latents::Latents;
use crate::matmul::{Output, Packed, matmul};
use crate::mla::{self, Softmax};

/// Heads of one attention task come in multiples of this.
const HEAD_GROUP: usize = mla::HEADS;

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

impl Cpu {
    pub(super) fn conv_rows(
        &self,
        x: &Rows,
        taps: &[f32],
        stream: usize,
        spans: &[Span],
        states: &mut [&mut KdaState],
        y: &mut Rows,
    ) {
        let width = x.width;
        let places = places(spans, x.rows);
        let count = taps.len() / width;
        self.each_row(x, y, |row, _, y| {
            let (s, i) = places[row];
            let before = &states[s].inputs[stream];
            // The i-th row of a span sees the last inputs of the state first, then the rows of the span.
            let inputs: Vec<&[f32]> = (0..count)
                .map(|tap| match (i + tap).checked_sub(count - 1) {
                    Some(inside) => x.row(spans[s].first + inside),
                    None => &before[(i + tap) * width..][..width],
                })
                .collect();
            // SAFETY: `new` checked the form.
            unsafe { kda::conv_silu(self.isa, taps, &inputs, y) }
        });
        for (span, state) in spans.iter().zip(states) {
            let kept = &mut state.inputs[stream];
            let newest = span.rows.min(count - 1);
            kept.copy_within(newest * width.., 0);
            let at = (count - 1 - newest) * width;
            for (j, kept) in kept[at..].chunks_exact_mut(width).enumerate() {
                kept.copy_from_slice(x.row(span.first + span.rows - newest + j));
            }
        }
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
            let steps: Vec<Step> = (span.first..span.first + span.rows)
                .map(|row| {
                    let [query, key, value, alpha] = inputs.map(|x| &x.row(row)[head * dim..][..dim]);
                    Step {
                        query,
                        key,
                        alpha,
                        value,
                        beta: beta.row(row)[head],
                    }
                })
                .collect();
            let mut o = vec![0.0; span.rows * dim];
            // SAFETY: `new` checked the form; this task alone writes this head of this span's rows.
            unsafe {
                kda::delta(self.isa, matrix, &steps, &mut o);
                for (row, o) in (span.first..).zip(o.chunks_exact(dim)) {
                    o.iter().enumerate().for_each(|(j, o)| out.set(row, head * dim + j, *o));
                }
            }
        });
    }

    pub(super) fn absorb_rows(&self, kv_b: &Weights, q: &Rows, shape: MlaShape, y: &mut Rows) {
        assert_eq!(kv_b.format, WeightFormat::Bf16, "kv_b is published as bf16");
        let (query, full) = (shape.nope + shape.shared, shape.latent + shape.shared);
        let row_bytes = shape.latent * 2;
        self.each_row(q, y, |_, q, y| {
            for (head, (q, y)) in q.chunks_exact(query).zip(y.chunks_exact_mut(full)).enumerate() {
                let first = head * (shape.nope + shape.value);
                let w = &kv_b.bytes()[first * row_bytes..(first + shape.nope) * row_bytes];
                let (absorbed, shared) = y.split_at_mut(shape.latent);
                // SAFETY: `new` checked the form.
                unsafe { mla::transposed(self.isa, w, &q[..shape.nope], absorbed) };
                shared.copy_from_slice(&q[shape.nope..]);
            }
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
        let groups = (self.threads * 2)
            .div_ceil(q.rows.max(1))
            .clamp(1, shape.heads.div_ceil(HEAD_GROUP));
        let group = shape
            .heads
            .div_ceil(groups)
            .next_multiple_of(HEAD_GROUP)
            .min(shape.heads);
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
            let (s, inside) = places[row];
            let positions = caches[s].len() - spans[s].rows + inside + 1;
            let queries = &q.row(row)[first * full..(first + heads) * full];
            let mut softmax = vec![Softmax::new(); heads];
            out.fill(0.0);
            for block in caches[s].blocks(positions) {
                // SAFETY: `new` checked the form.
                unsafe { mla::attend_block(self.isa, &mut softmax, queries, full, block, scale, out) };
            }
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

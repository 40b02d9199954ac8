use super::{LANES, Lane, Output, Packed, tree};
use crate::format::{BLOCK, Matrix};
use std::ops::Range;

/// The definition. Every other form must give these bits.
///
/// # Safety
/// As for `super::matmul`.
pub(super) unsafe fn matmul(w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output) {
    for output in outputs {
        for row in 0..x.rows() {
            let mut lanes = [0.0; LANES];
            for block in 0..w.cols().div_ceil(BLOCK) {
                accumulate(w, output, block, x.block(row, block), &mut lanes);
            }
            let sum = tree(lanes);
            let value = w.row_scale(output).map_or(sum, |scale| sum * scale);
            // SAFETY: inside the outputs that the caller gave to this call.
            unsafe { y.set(row, output, value) }
        }
    }
}

#[inline(always)]
fn accumulate(w: &Matrix, output: usize, block: usize, x: &[Lane], lanes: &mut [f32; LANES]) {
    for (l, lane) in lanes.iter_mut().enumerate() {
        for (half, x) in x.iter().enumerate() {
            let col = block * BLOCK + 2 * l + half;
            let weight = if col < w.cols() { w.at(output, col) } else { 0.0 };
            *lane = weight.mul_add(x.0[l], *lane);
        }
    }
}

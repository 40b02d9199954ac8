//! `y = W x` for any stored format and any number of rows, each output in the one canonical order.
//!
//! The order (`docs/numerics.md`, section 2): columns in blocks of 32, the last one filled up with zeros. Lane `l` of 16
//! takes columns `2l` and `2l + 1` of each block, blocks ascending, by fused multiply-adds from zero. Then the lanes are
//! added as a tree: `l + (l + 8)`, `+ 4`, `+ 2`, `+ 1`. An output depends on its own weights and its own row only.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod plain;
#[cfg(target_arch = "x86_64")]
mod tiles;

use crate::format::{BLOCK, Matrix};
use crate::isa::Isa;
use std::ops::Range;

/// Number of partial sums of an output.
pub const LANES: usize = 16;

/// One set of 16 partial sums or of 16 columns, aligned to a cache line.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C, align(64))]
pub struct Lane(pub [f32; LANES]);

/// Adds the 16 lanes in the fixed order.
#[inline(always)]
pub fn tree(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Activation rows arranged for the canonical order: per block of 32 columns the 16 even ones, then the 16 odd ones.
#[derive(Clone, Debug, Default)]
pub struct Packed {
    rows: usize,
    cols: usize,
    blocks: usize,
    data: Vec<Lane>,
}

impl Packed {
    /// Arranges `rows` rows of `cols` numbers; `row(i)` gives the i-th. Memory is reused from call to call.
    pub fn pack<'a>(&mut self, rows: usize, cols: usize, row: impl Fn(usize) -> &'a [f32]) {
        self.rows = rows;
        self.cols = cols;
        self.blocks = cols.div_ceil(BLOCK);
        self.data.clear();
        self.data.resize(rows * self.blocks * 2, Lane::default());
        for i in 0..rows {
            let source = &row(i)[..cols];
            let target = &mut self.data[i * self.blocks * 2..][..self.blocks * 2];
            for (block, pair) in source.chunks(BLOCK).zip(target.chunks_exact_mut(2)) {
                let [even, odd] = pair else {
                    unreachable!("chunks of two")
                };
                if block.len() == BLOCK {
                    for l in 0..LANES {
                        even.0[l] = block[2 * l];
                        odd.0[l] = block[2 * l + 1];
                    }
                } else {
                    for (c, &v) in block.iter().enumerate() {
                        (if c % 2 == 0 { &mut *even } else { &mut *odd }).0[c / 2] = v;
                    }
                }
            }
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The blocks of one row: `2 * ceil(cols / 32)` lanes.
    pub(crate) fn row(&self, i: usize) -> &[Lane] {
        &self.data[i * self.blocks * 2..][..self.blocks * 2]
    }
}

/// Where the products of one call go: element `(row, output)` at `base + row * stride + output`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    base: *mut f32,
    stride: usize,
}

// SAFETY: `Output` is a plain address. Whoever writes through it keeps to outputs that nobody else touches; see
// `matmul`'s contract.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

impl Output {
    /// Results as a row-major `[rows, outputs]` matrix.
    pub(crate) fn new(y: &mut [f32], rows: usize, stride: usize) -> Self {
        assert!(
            y.len() >= rows * stride,
            "output of {} numbers for {rows} rows of {stride}",
            y.len()
        );
        Self {
            base: y.as_mut_ptr(),
            stride,
        }
    }

    /// The same results seen from `output` on: what was output `output` becomes output 0.
    pub(crate) fn from(self, output: usize) -> Self {
        // `wrapping_add` because the address is only computed here; `set` says what may be touched.
        Self {
            base: self.base.wrapping_add(output),
            stride: self.stride,
        }
    }

    /// Stores one result.
    ///
    /// # Safety
    /// `(row, output)` lies inside the matrix that `new` was given, which is still alive, and no other thread touches
    /// this element.
    #[inline(always)]
    pub(crate) unsafe fn set(self, row: usize, output: usize, value: f32) {
        // SAFETY: the caller's promise.
        unsafe { *self.base.add(row * self.stride + output) = value }
    }
}

/// Computes `outputs` of `W x` for every row of `x`.
///
/// # Safety
/// The processor runs `isa`. `y` outlives the call, holds `x.rows()` rows of at least `outputs.end` elements, and nobody
/// else touches the elements of these outputs meanwhile.
pub(crate) unsafe fn matmul(isa: Isa, w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output) {
    assert_eq!(w.cols(), x.cols(), "{w} times rows of {}", x.cols());
    assert!(
        outputs.end <= w.rows() && outputs.end <= y.stride,
        "outputs {outputs:?} of {w}"
    );
    if outputs.is_empty() || x.rows() == 0 {
        return;
    }
    // SAFETY: the caller's promise, and the shapes were checked above and by `Matrix::new`.
    unsafe {
        match isa {
            Isa::Plain => plain::matmul(w, outputs, x, y),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => tiles::matmul::<avx2::Avx2>(w, outputs, x, y),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => tiles::matmul::<avx512::Avx512>(w, outputs, x, y),
            #[cfg(not(target_arch = "x86_64"))]
            _ => plain::matmul(w, outputs, x, y),
        }
    }
}

#[cfg(test)]
mod tests;

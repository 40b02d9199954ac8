//! `y = W x` for any stored format and any number of rows, each output in the one canonical order.
//!
//! The order (`docs/numerics.md`, section 2): columns in blocks of 32, the last one filled up with zeros. Lane `l` of 16
//! takes columns `2l` and `2l + 1` of each block, blocks ascending, by fused multiply-adds from zero. Then the lanes are
//! added as a tree: `l + (l + 8)`, `+ 4`, `+ 2`, `+ 1`. An output depends on its own weights and its own row only.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod few;
#[cfg(target_arch = "x86_64")]
mod form;
mod packed;
mod plain;
#[cfg(target_arch = "x86_64")]
mod tiles;

use crate::format::Matrix;
use crate::isa::Isa;
pub use packed::Packed;
use std::ops::Range;

/// Number of partial sums of an output.
pub const LANES: usize = 16;
/// Blocks of 32 columns that are taken together: a panel of weights and a row tile's part of the activations stay in the
/// first-level cache for so many columns. Activations are laid out in these steps.
const PANEL_BLOCKS: usize = 16;
/// Lanes of a panel's row: even and odd columns of each block.
const PANEL_LANES: usize = 2 * PANEL_BLOCKS;

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

/// Where the products of one call go: element `(row, output)` at `base + place(row) * stride + output`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output<'a> {
    base: *mut f32,
    stride: usize,
    /// Number of places.
    rows: usize,
    /// Place of each row; without it rows lie one after the other.
    places: Option<&'a [usize]>,
}

// SAFETY: `Output` is a plain address. Whoever writes through it keeps to outputs that nobody else touches; see
// `matmul`'s contract.
unsafe impl Send for Output<'_> {}
// SAFETY: as above.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// Results as a row-major `[rows, outputs]` matrix.
    pub(crate) fn new(y: &'a mut [f32], rows: usize, stride: usize) -> Self {
        assert!(
            y.len() >= rows * stride,
            "output of {} numbers for {rows} rows of {stride}",
            y.len()
        );
        Self {
            base: y.as_mut_ptr(),
            stride,
            rows,
            places: None,
        }
    }

    /// Row `i` of the results goes to row `places[i]` of the matrix; no two to the same.
    pub(crate) fn at(self, places: &'a [usize]) -> Self {
        assert!(
            places.iter().all(|&place| place < self.rows),
            "a place beyond the output"
        );
        Self {
            places: Some(places),
            rows: places.len(),
            ..self
        }
    }

    /// The same results seen from `output` on: what was output `output` becomes output 0.
    pub(crate) fn from(self, output: usize) -> Self {
        // `wrapping_add` because the address is only computed here; `set` says what may be touched.
        Self {
            base: self.base.wrapping_add(output),
            ..self
        }
    }

    /// Some elements of a row.
    ///
    /// # Safety
    /// They lie inside the matrix that `new` was given, which is still alive, and nobody writes to them while they are borrowed.
    pub(crate) unsafe fn row(self, row: usize, elements: &Range<usize>) -> &'a [f32] {
        // SAFETY: the caller's promise, and the elements lie inside, as `start` checks.
        unsafe { std::slice::from_raw_parts(self.start(row, elements), elements.len()) }
    }

    /// Some elements of a row, to be written.
    ///
    /// # Safety
    /// As for [`row`](Self::row), and nobody reads them either.
    pub(crate) unsafe fn row_mut(self, row: usize, elements: &Range<usize>) -> &'a mut [f32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start(row, elements), elements.len()) }
    }

    fn start(self, row: usize, elements: &Range<usize>) -> *mut f32 {
        assert!(row < self.rows && elements.end <= self.stride && self.places.is_none());
        self.base.wrapping_add(row * self.stride + elements.start)
    }

    /// Stores one result.
    ///
    /// # Safety
    /// `(row, output)` lies inside the matrix that `new` was given, which is still alive, and no other thread touches
    /// this element.
    #[inline(always)]
    pub(crate) unsafe fn set(self, row: usize, output: usize, value: f32) {
        let place = self.places.map_or(row, |places| places[row]);
        // SAFETY: the caller's promise; places were checked.
        unsafe { *self.base.add(place * self.stride + output) = value }
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
        outputs.end <= w.rows() && outputs.end <= y.stride && x.rows() <= y.rows,
        "outputs {outputs:?} of {w} for {} rows",
        x.rows()
    );
    if outputs.is_empty() || x.rows() == 0 {
        return;
    }
    // SAFETY: the caller's promise, and the shapes were checked above and by `Matrix::new`.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::matmul(w, outputs, x, y),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::matmul(w, outputs, x, y),
            _ => plain::matmul(w, outputs, x, y),
        }
    }
}

#[cfg(test)]
mod tests;

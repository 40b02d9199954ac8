//! What a vector form must be able to do, and the stored formats in its terms.

use super::{LANES, Lane};
use crate::format::{BLOCK, E8M0, Elements, Matrix};
use std::arch::x86_64::*;

/// A vector form of the product. All functions need the processor feature of their form; that is a condition of each.
pub(super) trait Form {
    /// A register: `LANES / PARTS` of the 16 lanes.
    type Reg: Copy;
    /// Registers that the 16 lanes take. Part `p` holds lanes `p * LANES / PARTS` and following.
    const PARTS: usize;

    unsafe fn zero() -> Self::Reg;
    /// From an aligned lane's part.
    unsafe fn load(from: *const f32) -> Self::Reg;
    unsafe fn store(to: *mut f32, v: Self::Reg);
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::Reg, b: Self::Reg, c: Self::Reg) -> Self::Reg;
    /// The lanes added in the order of `super::tree`.
    #[inline(always)]
    unsafe fn tree(lane: &Lane) -> f32 {
        let from = lane.0.as_ptr();
        // SAFETY: every form has AVX.
        unsafe {
            let v = _mm256_add_ps(_mm256_load_ps(from), _mm256_load_ps(from.add(8)));
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }

    /// Even and odd columns of `2 LANES / PARTS` bf16 numbers; so for the next three.
    unsafe fn bf16(from: *const u8) -> [Self::Reg; 2];
    unsafe fn f32(from: *const u8) -> [Self::Reg; 2];
    unsafe fn int8(from: *const u8) -> [Self::Reg; 2];
    /// Nibbles of a block with this scale.
    unsafe fn mxfp4(from: *const u8, scale: f32) -> [Self::Reg; 2];
}

/// A weight matrix as addresses.
#[derive(Clone, Copy)]
pub(super) struct Stored {
    data: *const u8,
    row_bytes: usize,
    /// The scales of MXFP4 or int8.
    scale: *const u8,
    cols: usize,
}

impl Stored {
    /// Whole blocks of a row.
    #[inline(always)]
    pub(super) fn whole(self) -> usize {
        self.cols / BLOCK
    }

    #[inline(always)]
    pub(super) fn row_bytes(self) -> usize {
        self.row_bytes
    }

    /// Where a block would lie, which need not exist.
    #[inline(always)]
    pub(super) fn address<K: Kind>(self, row: usize, block: usize) -> *const u8 {
        self.data.wrapping_add(row * self.row_bytes + block * K::BYTES)
    }

    /// Whether a row ends with a part of a block.
    #[inline(always)]
    pub(super) fn partial(self) -> bool {
        !self.cols.is_multiple_of(BLOCK)
    }
}

/// A stored format.
pub(super) trait Kind {
    /// Bytes of a block of 32 columns.
    const BYTES: usize;
    /// Whether decoding takes several registers.
    const HEAVY: bool = false;

    /// Even and odd columns of one part of a block at `from`, which is block `block` of row `row` or a copy of it.
    ///
    /// # Safety
    /// As for `Form`; a whole block lies at `from`.
    unsafe fn weights<F: Form>(w: Stored, from: *const u8, row: usize, block: usize, part: usize) -> [F::Reg; 2];

    /// What a row's sum is multiplied by.
    ///
    /// # Safety
    /// `row` lies inside `w`.
    #[inline(always)]
    unsafe fn scaled(_w: Stored, _row: usize, sum: f32) -> f32 {
        sum
    }
}

pub(super) struct Bf16;
pub(super) struct F32;
pub(super) struct Int8;
pub(super) struct Mxfp4;

impl Kind for Bf16 {
    const BYTES: usize = 2 * BLOCK;
    #[inline(always)]
    unsafe fn weights<F: Form>(_: Stored, from: *const u8, _: usize, _: usize, part: usize) -> [F::Reg; 2] {
        // SAFETY: the caller's promise.
        unsafe { F::bf16(from.add(part * Self::BYTES / F::PARTS)) }
    }
}

impl Kind for F32 {
    const BYTES: usize = 4 * BLOCK;
    #[inline(always)]
    unsafe fn weights<F: Form>(_: Stored, from: *const u8, _: usize, _: usize, part: usize) -> [F::Reg; 2] {
        // SAFETY: the caller's promise.
        unsafe { F::f32(from.add(part * Self::BYTES / F::PARTS)) }
    }
}

impl Kind for Int8 {
    const BYTES: usize = BLOCK;
    #[inline(always)]
    unsafe fn weights<F: Form>(_: Stored, from: *const u8, _: usize, _: usize, part: usize) -> [F::Reg; 2] {
        // SAFETY: the caller's promise.
        unsafe { F::int8(from.add(part * Self::BYTES / F::PARTS)) }
    }
    #[inline(always)]
    unsafe fn scaled(w: Stored, row: usize, sum: f32) -> f32 {
        // SAFETY: one f32 a row, of any alignment.
        sum * unsafe { w.scale.cast::<f32>().add(row).read_unaligned() }
    }
}

impl Kind for Mxfp4 {
    const BYTES: usize = BLOCK / 2;
    const HEAVY: bool = true;
    #[inline(always)]
    unsafe fn weights<F: Form>(w: Stored, from: *const u8, row: usize, block: usize, part: usize) -> [F::Reg; 2] {
        // SAFETY: the caller's promise; one scale byte a block, and the table has an entry for every byte.
        unsafe {
            let scale = *E8M0.get_unchecked(*w.scale.add(row * w.whole() + block) as usize);
            F::mxfp4(from.add(part * Self::BYTES / F::PARTS), scale)
        }
    }
}

/// Where block `block` of row `row` lies.
///
/// # Safety
/// It lies inside `w`.
#[inline(always)]
pub(super) unsafe fn block_at<K: Kind>(w: Stored, row: usize, block: usize) -> *const u8 {
    // SAFETY: the caller's promise.
    unsafe { w.data.add(row * w.row_bytes + block * K::BYTES) }
}

/// A copy of the part of a block that ends row `row`, filled up with zeros.
///
/// # Safety
/// The row lies inside `w`.
pub(super) unsafe fn last_block<K: Kind>(w: Stored, row: usize) -> [u8; 4 * BLOCK] {
    let mut copy = [0; 4 * BLOCK];
    let first = w.whole() * K::BYTES;
    // SAFETY: these bytes are the end of the row, and less than a block.
    unsafe { std::ptr::copy_nonoverlapping(block_at::<K>(w, row, w.whole()), copy.as_mut_ptr(), w.row_bytes - first) };
    copy
}

/// Runs `task` with the matrix's format as a type.
macro_rules! with_kind {
    ($w:expr, $kind:ident, $stored:ident => $task:expr) => {{
        use $crate::format::Elements;
        use $crate::matmul::form;
        let $stored = form::stored($w);
        match $w.elements() {
            Elements::Bf16(_) => {
                type $kind = form::Bf16;
                $task
            }
            Elements::F32(_) => {
                type $kind = form::F32;
                $task
            }
            Elements::Int8 { .. } => {
                type $kind = form::Int8;
                $task
            }
            Elements::Mxfp4 { .. } => {
                type $kind = form::Mxfp4;
                $task
            }
        }
    }};
}
pub(super) use with_kind;

/// The addresses of `w`, whose lengths `Matrix::new` has checked.
pub(super) fn stored(w: &Matrix) -> Stored {
    let cols = w.cols();
    let none: &[u8] = &[];
    let (data, scale, row_bytes) = match w.elements() {
        Elements::Bf16(data) => (data, none, 2 * cols),
        Elements::F32(data) => (data, none, 4 * cols),
        Elements::Int8 { data, scale } => (data, scale, cols),
        Elements::Mxfp4 { packed, scale } => (packed, scale, cols / 2),
    };
    Stored {
        data: data.as_ptr(),
        row_bytes,
        scale: scale.as_ptr(),
        cols,
    }
}

/// Where a part of a lane begins.
///
/// # Safety
/// A lane lies there.
#[inline(always)]
pub(super) unsafe fn part<F: Form>(lane: *const Lane, part: usize) -> *const f32 {
    // SAFETY: a part begins inside the lane.
    unsafe { lane.cast::<f32>().add(part * LANES / F::PARTS) }
}

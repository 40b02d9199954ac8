use super::tiles::Form;
use super::{Lane, Output, Packed};
use crate::format::{BLOCK, E2M1, E8M0, Elements, Matrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// 16 lanes in two registers: lanes 0..8 and lanes 8..16.
pub(super) struct Avx2;

/// Sixteen lanes.
type Pair = [__m256; 2];

const TILE_OUTPUTS: usize = 2;
const TILE_ROWS: usize = 3;

impl Form for Avx2 {
    const FEW_ROWS: usize = 2;
    const TILE_OUTPUTS: usize = TILE_OUTPUTS;
    const TILE_ROWS: usize = TILE_ROWS;

    unsafe fn few(w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output) {
        // SAFETY: the caller's promise.
        unsafe {
            match x.rows() {
                0 => {}
                1 => few::<1>(w, outputs, x, y),
                _ => few::<2>(w, outputs, x, y),
            }
        }
    }

    unsafe fn decode(w: &Matrix, row: usize, blocks: Range<usize>, out: &mut [Lane]) {
        // SAFETY: the caller's promise.
        unsafe { decode(w, row, blocks, out) }
    }

    unsafe fn tile(w: *const Lane, x: *const Lane, lanes: usize, rows: usize, acc: &mut [Lane]) {
        // SAFETY: the caller's promise.
        unsafe {
            match rows {
                1 => tile::<1>(w, x, lanes, acc),
                2 => tile::<2>(w, x, lanes, acc),
                _ => tile::<3>(w, x, lanes, acc),
            }
        }
    }
}

/// The even and the odd columns of one block of one weight row, as f32.
///
/// # Safety
/// The block lies inside the row. Columns beyond the row's end come out as zeros.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn block(w: &Matrix, row: usize, block: usize) -> (Pair, Pair) {
    let at = row * w.cols() + block * BLOCK;
    let left = (w.cols() - block * BLOCK).min(BLOCK);
    match w.elements() {
        Elements::Bf16(d) => {
            let bytes = &d[at * 2..(at + left) * 2];
            let mut filled = [0u8; 2 * BLOCK];
            let p = if left == BLOCK {
                bytes.as_ptr()
            } else {
                filled[..bytes.len()].copy_from_slice(bytes);
                filled.as_ptr()
            };
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let mut even = [_mm256_setzero_ps(); 2];
            let mut odd = even;
            for h in 0..2 {
                // SAFETY: `p` points to 64 bytes.
                let v = unsafe { _mm256_loadu_si256(p.add(32 * h).cast()) };
                even[h] = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
                odd[h] = _mm256_castsi256_ps(_mm256_and_si256(v, high));
            }
            (even, odd)
        }
        Elements::F32(d) => {
            let bytes = &d[at * 4..(at + left) * 4];
            let mut filled = [0u8; 4 * BLOCK];
            let p = if left == BLOCK {
                bytes.as_ptr()
            } else {
                filled[..bytes.len()].copy_from_slice(bytes);
                filled.as_ptr()
            };
            let mut even = [_mm256_setzero_ps(); 2];
            let mut odd = even;
            for h in 0..2 {
                // SAFETY: `p` points to 128 bytes.
                let (a, b) = unsafe {
                    (
                        _mm256_loadu_ps(p.add(64 * h).cast()),
                        _mm256_loadu_ps(p.add(64 * h + 32).cast()),
                    )
                };
                // Within each half of a register the shuffle keeps order; the permutation joins the halves.
                let join = |v| _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0b11_01_10_00));
                even[h] = join(_mm256_shuffle_ps(a, b, 0b10_00_10_00));
                odd[h] = join(_mm256_shuffle_ps(a, b, 0b11_01_11_01));
            }
            (even, odd)
        }
        Elements::Mxfp4 { packed, scale } => {
            // SAFETY: the table has 16 entries, of which the first 8 are the magnitudes.
            let table = unsafe { _mm256_loadu_ps(E2M1.as_ptr()) };
            let table = _mm256_mul_ps(table, _mm256_set1_ps(E8M0[scale[at / BLOCK] as usize]));
            let bytes = &packed[at / 2..at / 2 + BLOCK / 2];
            let sign = _mm256_set1_epi32(i32::MIN);
            let mut even = [_mm256_setzero_ps(); 2];
            let mut odd = even;
            for h in 0..2 {
                // SAFETY: 8 bytes of the 16 of the block.
                let v = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(bytes.as_ptr().add(8 * h).cast()) });
                // An index counts by its three low bits only; bit 3 of a nibble is its sign.
                let low = _mm256_permutevar8x32_ps(table, v);
                let high = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(v, 4));
                let low_sign = _mm256_and_si256(_mm256_slli_epi32(v, 28), sign);
                let high_sign = _mm256_and_si256(_mm256_slli_epi32(v, 24), sign);
                even[h] = _mm256_xor_ps(low, _mm256_castsi256_ps(low_sign));
                odd[h] = _mm256_xor_ps(high, _mm256_castsi256_ps(high_sign));
            }
            (even, odd)
        }
    }
}

/// Adds the lanes in the order of `super::tree`.
#[inline]
#[target_feature(enable = "avx2")]
fn reduce(v: Pair) -> f32 {
    let v = _mm256_add_ps(v[0], v[1]);
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// # Safety
/// As for `Form::few`, with `M` rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn few<const M: usize>(w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output) {
    let mut output = outputs.start;
    // SAFETY: the outputs stay below `outputs.end`.
    unsafe {
        while output + TILE_OUTPUTS <= outputs.end {
            strip::<M, TILE_OUTPUTS>(w, output, x, y);
            output += TILE_OUTPUTS;
        }
        if output < outputs.end {
            strip::<M, 1>(w, output, x, y);
        }
    }
}

/// `N` outputs from `output` on, for `M` rows.
///
/// # Safety
/// As for `few`.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn strip<const M: usize, const N: usize>(w: &Matrix, output: usize, x: &Packed, y: Output) {
    let mut acc = [[[_mm256_setzero_ps(); 2]; M]; N];
    // SAFETY: every packed row holds as many blocks as a weight row.
    unsafe {
        for b in 0..w.cols().div_ceil(BLOCK) {
            for (n, acc) in acc.iter_mut().enumerate() {
                let (even, odd) = block(w, output + n, b);
                for (m, acc) in acc.iter_mut().enumerate() {
                    let x = x.row(m).as_ptr().add(2 * b);
                    add(even, x, acc);
                    add(odd, x.add(1), acc);
                }
            }
        }
        for (n, acc) in acc.iter().enumerate() {
            for (m, &acc) in acc.iter().enumerate() {
                y.set(m, output + n, reduce(acc));
            }
        }
    }
}

/// # Safety
/// `x` points to a lane.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add(w: Pair, x: *const Lane, acc: &mut Pair) {
    for h in 0..2 {
        // SAFETY: half a lane each; lanes are aligned.
        acc[h] = _mm256_fmadd_ps(w[h], unsafe { _mm256_load_ps(x.cast::<f32>().add(8 * h)) }, acc[h]);
    }
}

/// # Safety
/// As for `Form::decode`.
#[target_feature(enable = "avx2,fma")]
unsafe fn decode(w: &Matrix, row: usize, blocks: Range<usize>, out: &mut [Lane]) {
    for (i, b) in blocks.enumerate() {
        // SAFETY: the block lies inside the row; lanes are aligned and hold two registers.
        unsafe {
            let (even, odd) = block(w, row, b);
            for (half, v) in [even, odd].into_iter().enumerate() {
                let lane = &mut out[(2 * i + half) * TILE_OUTPUTS].0;
                _mm256_store_ps(lane.as_mut_ptr(), v[0]);
                _mm256_store_ps(lane.as_mut_ptr().add(8), v[1]);
            }
        }
    }
}

/// # Safety
/// As for `Form::tile`, with `M` rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const M: usize>(w: *const Lane, x: *const Lane, lanes: usize, sums: &mut [Lane]) {
    assert!(sums.len() >= TILE_OUTPUTS * TILE_ROWS);
    let mut acc = [[[_mm256_setzero_ps(); 2]; M]; TILE_OUTPUTS];
    // SAFETY: the caller's promise on w and x; `sums` was checked; lanes are aligned.
    unsafe {
        for (n, acc) in acc.iter_mut().enumerate() {
            for (m, acc) in acc.iter_mut().enumerate() {
                let p = sums[n * TILE_ROWS + m].0.as_ptr();
                *acc = [_mm256_load_ps(p), _mm256_load_ps(p.add(8))];
            }
        }
        for lane in 0..lanes {
            for (n, acc) in acc.iter_mut().enumerate() {
                let p = w.add(lane * TILE_OUTPUTS + n).cast::<f32>();
                let w = [_mm256_load_ps(p), _mm256_load_ps(p.add(8))];
                for (m, acc) in acc.iter_mut().enumerate() {
                    add(w, x.add(lane * M + m), acc);
                }
            }
        }
        for (n, acc) in acc.iter().enumerate() {
            for (m, acc) in acc.iter().enumerate() {
                let p = sums[n * TILE_ROWS + m].0.as_mut_ptr();
                _mm256_store_ps(p, acc[0]);
                _mm256_store_ps(p.add(8), acc[1]);
            }
        }
    }
}

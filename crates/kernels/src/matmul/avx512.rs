use super::tiles::Form;
use super::{Lane, Output, Packed};
use crate::format::{BLOCK, E2M1, E8M0, Elements, Matrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// 16 lanes in one register; two registers (even and odd columns) a block.
pub(super) struct Avx512;

const TILE_OUTPUTS: usize = 4;
const TILE_ROWS: usize = 6;

impl Form for Avx512 {
    const FEW_ROWS: usize = 4;
    const TILE_OUTPUTS: usize = TILE_OUTPUTS;
    const TILE_ROWS: usize = TILE_ROWS;

    unsafe fn few(w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output) {
        // SAFETY: the caller's promise.
        unsafe {
            match x.rows() {
                0 => {}
                1 => few::<1>(w, outputs, x, y),
                2 => few::<2>(w, outputs, x, y),
                3 => few::<3>(w, outputs, x, y),
                _ => few::<4>(w, outputs, x, y),
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
                3 => tile::<3>(w, x, lanes, acc),
                4 => tile::<4>(w, x, lanes, acc),
                5 => tile::<5>(w, x, lanes, acc),
                _ => tile::<6>(w, x, lanes, acc),
            }
        }
    }
}

/// The even and the odd columns of one block of one weight row.
trait Source: Copy {
    /// # Safety
    /// AVX-512; the block lies inside the row and is whole.
    unsafe fn block(self, row: usize, block: usize) -> (__m512, __m512);
    /// # Safety
    /// AVX-512; the block lies inside the row; columns beyond the row's end come out as zeros.
    unsafe fn last(self, row: usize, block: usize) -> (__m512, __m512);
}

#[derive(Clone, Copy)]
struct Bf16 {
    data: *const u8,
    cols: usize,
}

impl Bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn split(v: __m512i) -> (__m512, __m512) {
        let even = _mm512_slli_epi32(v, 16);
        let odd = _mm512_and_si512(v, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        (_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd))
    }
}

impl Source for Bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn block(self, row: usize, block: usize) -> (__m512, __m512) {
        // SAFETY: 64 bytes of a whole block of this row.
        Self::split(unsafe { _mm512_loadu_si512(self.data.add((row * self.cols + block * BLOCK) * 2).cast()) })
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn last(self, row: usize, block: usize) -> (__m512, __m512) {
        let left = (self.cols - block * BLOCK).min(BLOCK);
        let mask = ((1u64 << left) - 1) as u32;
        // SAFETY: the mask keeps the load inside the row.
        Self::split(unsafe {
            _mm512_maskz_loadu_epi16(mask, self.data.add((row * self.cols + block * BLOCK) * 2).cast())
        })
    }
}

#[derive(Clone, Copy)]
struct F32 {
    data: *const u8,
    cols: usize,
}

impl F32 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn split(low: __m512, high: __m512) -> (__m512, __m512) {
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        (
            _mm512_permutex2var_ps(low, even, high),
            _mm512_permutex2var_ps(low, odd, high),
        )
    }
}

impl Source for F32 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn block(self, row: usize, block: usize) -> (__m512, __m512) {
        // SAFETY: 128 bytes of a whole block of this row.
        unsafe {
            let p = self.data.add((row * self.cols + block * BLOCK) * 4).cast::<f32>();
            Self::split(_mm512_loadu_ps(p), _mm512_loadu_ps(p.add(16)))
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn last(self, row: usize, block: usize) -> (__m512, __m512) {
        let left = (self.cols - block * BLOCK).min(BLOCK);
        let mask = ((1u64 << left) - 1) as u32;
        // SAFETY: the masks keep the loads inside the row; `wrapping_add` because the second half may begin beyond it.
        unsafe {
            let p = self.data.add((row * self.cols + block * BLOCK) * 4).cast::<f32>();
            let low = _mm512_maskz_loadu_ps(mask as u16, p);
            let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, p.wrapping_add(16));
            Self::split(low, high)
        }
    }
}

#[derive(Clone, Copy)]
struct Mxfp4 {
    packed: *const u8,
    scale: *const u8,
    blocks: usize,
}

impl Source for Mxfp4 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn block(self, row: usize, block: usize) -> (__m512, __m512) {
        // SAFETY: 16 packed bytes and one scale byte of this block of this row.
        unsafe {
            let at = row * self.blocks + block;
            let dwords = _mm512_cvtepu8_epi32(_mm_loadu_si128(self.packed.add(at * 16).cast()));
            // The table is scaled once a block, so a lookup gives the finished weight. Only four bits of an index count.
            let scale = _mm512_set1_ps(*E8M0.get_unchecked(*self.scale.add(at) as usize));
            let table = _mm512_mul_ps(_mm512_loadu_ps(E2M1.as_ptr()), scale);
            (
                _mm512_permutexvar_ps(dwords, table),
                _mm512_permutexvar_ps(_mm512_srli_epi32(dwords, 4), table),
            )
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn last(self, row: usize, block: usize) -> (__m512, __m512) {
        // SAFETY: rows of MXFP4 hold whole blocks only.
        unsafe { self.block(row, block) }
    }
}

/// Adds the lanes in the order of `super::tree`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn reduce(v: __m512) -> f32 {
    let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// # Safety
/// As for `Form::few`, with `M` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn few<const M: usize>(w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output) {
    // SAFETY: the caller's promise; `Matrix::new` checked the lengths.
    unsafe {
        match w.elements() {
            Elements::Bf16(d) => few_from::<M, _>(
                Bf16 {
                    data: d.as_ptr(),
                    cols: w.cols(),
                },
                w.cols(),
                outputs,
                x,
                y,
            ),
            Elements::F32(d) => few_from::<M, _>(
                F32 {
                    data: d.as_ptr(),
                    cols: w.cols(),
                },
                w.cols(),
                outputs,
                x,
                y,
            ),
            Elements::Mxfp4 { packed, scale } => {
                let source = Mxfp4 {
                    packed: packed.as_ptr(),
                    scale: scale.as_ptr(),
                    blocks: w.cols() / BLOCK,
                };
                few_from::<M, _>(source, w.cols(), outputs, x, y);
            }
        }
    }
}

/// # Safety
/// As for `few`; `source` covers `outputs.end` rows of `cols` columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn few_from<const M: usize, S: Source>(source: S, cols: usize, outputs: Range<usize>, x: &Packed, y: Output) {
    let mut output = outputs.start;
    // SAFETY: the outputs stay below `outputs.end`.
    unsafe {
        while output + TILE_OUTPUTS <= outputs.end {
            strip::<M, TILE_OUTPUTS, S>(source, cols, output, x, y);
            output += TILE_OUTPUTS;
        }
        while output < outputs.end {
            strip::<M, 1, S>(source, cols, output, x, y);
            output += 1;
        }
    }
}

/// `N` outputs from `output` on, for `M` rows.
///
/// # Safety
/// As for `few_from`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn strip<const M: usize, const N: usize, S: Source>(
    source: S,
    cols: usize,
    output: usize,
    x: &Packed,
    y: Output,
) {
    let whole = cols / BLOCK;
    let rows: [*const Lane; M] = std::array::from_fn(|m| x.row(m).as_ptr());
    let mut acc = [[_mm512_setzero_ps(); M]; N];
    // SAFETY: blocks below `cols.div_ceil(32)` exist in the weights and in every packed row.
    unsafe {
        for block in 0..whole {
            for (n, acc) in acc.iter_mut().enumerate() {
                let (even, odd) = source.block(output + n, block);
                add_block(even, odd, &rows, block, acc);
            }
        }
        if !cols.is_multiple_of(BLOCK) {
            for (n, acc) in acc.iter_mut().enumerate() {
                let (even, odd) = source.last(output + n, whole);
                add_block(even, odd, &rows, whole, acc);
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
/// Every row holds `block`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_block<const M: usize>(
    even: __m512,
    odd: __m512,
    rows: &[*const Lane; M],
    block: usize,
    acc: &mut [__m512; M],
) {
    // SAFETY: the caller's promise; lanes are 64-byte aligned.
    unsafe {
        for (acc, row) in acc.iter_mut().zip(rows) {
            *acc = _mm512_fmadd_ps(even, _mm512_load_ps(row.add(2 * block).cast()), *acc);
            *acc = _mm512_fmadd_ps(odd, _mm512_load_ps(row.add(2 * block + 1).cast()), *acc);
        }
    }
}

/// # Safety
/// As for `Form::decode`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn decode(w: &Matrix, row: usize, blocks: Range<usize>, out: &mut [Lane]) {
    // SAFETY: the caller's promise; `Matrix::new` checked the lengths.
    unsafe {
        match w.elements() {
            Elements::Bf16(d) => decode_from(
                Bf16 {
                    data: d.as_ptr(),
                    cols: w.cols(),
                },
                w.cols(),
                row,
                blocks,
                out,
            ),
            Elements::F32(d) => decode_from(
                F32 {
                    data: d.as_ptr(),
                    cols: w.cols(),
                },
                w.cols(),
                row,
                blocks,
                out,
            ),
            Elements::Mxfp4 { packed, scale } => {
                let source = Mxfp4 {
                    packed: packed.as_ptr(),
                    scale: scale.as_ptr(),
                    blocks: w.cols() / BLOCK,
                };
                decode_from(source, w.cols(), row, blocks, out);
            }
        }
    }
}

/// # Safety
/// As for `decode`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn decode_from<S: Source>(source: S, cols: usize, row: usize, blocks: Range<usize>, out: &mut [Lane]) {
    let last = (2 * blocks.len()).saturating_sub(1) * TILE_OUTPUTS;
    assert!(
        out.len() > last,
        "{} lanes for a panel row that ends at {last}",
        out.len()
    );
    for (i, block) in blocks.enumerate() {
        // SAFETY: the block lies inside the row, and whether it is whole decides the form; `out` was checked.
        unsafe {
            let (even, odd) = if (block + 1) * BLOCK <= cols {
                source.block(row, block)
            } else {
                source.last(row, block)
            };
            _mm512_store_ps(out.as_mut_ptr().add(2 * i * TILE_OUTPUTS).cast(), even);
            _mm512_store_ps(out.as_mut_ptr().add((2 * i + 1) * TILE_OUTPUTS).cast(), odd);
        }
    }
}

/// # Safety
/// As for `Form::tile`, with `M` rows.
#[target_feature(enable = "avx512f")]
unsafe fn tile<const M: usize>(w: *const Lane, x: *const Lane, lanes: usize, sums: &mut [Lane]) {
    assert!(sums.len() >= TILE_OUTPUTS * TILE_ROWS);
    let mut acc = [[_mm512_setzero_ps(); M]; TILE_OUTPUTS];
    // SAFETY: the caller's promise on w and x; `sums` was checked; lanes are 64-byte aligned.
    unsafe {
        for (n, acc) in acc.iter_mut().enumerate() {
            for (m, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_load_ps(sums[n * TILE_ROWS + m].0.as_ptr());
            }
        }
        for lane in 0..lanes {
            let x: [__m512; M] = std::array::from_fn(|m| _mm512_load_ps(x.add(lane * M + m).cast()));
            for (n, acc) in acc.iter_mut().enumerate() {
                let w = _mm512_load_ps(w.add(lane * TILE_OUTPUTS + n).cast());
                for (acc, &x) in acc.iter_mut().zip(&x) {
                    *acc = _mm512_fmadd_ps(w, x, *acc);
                }
            }
        }
        for (n, acc) in acc.iter().enumerate() {
            for (m, &acc) in acc.iter().enumerate() {
                _mm512_store_ps(sums[n * TILE_ROWS + m].0.as_mut_ptr(), acc);
            }
        }
    }
}

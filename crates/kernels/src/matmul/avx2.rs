use super::few::{FEW_ROWS, few};
use super::form::{Form, with_kind};
use super::tiles::many;
use super::{Output, Packed};
use crate::format::{E2M1, Matrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// # Safety
/// As for `super::matmul`; AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn matmul(w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output) {
    // SAFETY: the caller's promise.
    with_kind!(w, K, stored => unsafe {
        if x.rows() <= FEW_ROWS {
            few::<Avx2, K>(stored, outputs, x, y)
        } else {
            many::<Avx2, K>(stored, outputs, x, y)
        }
    })
}

/// 16 lanes in two registers: lanes 0..8 and lanes 8..16.
struct Avx2;

// SAFETY (all blocks below): the caller's promise that the processor runs this form and on what lies at an address.
impl Form for Avx2 {
    type Reg = __m256;
    const PARTS: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: as said above.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: as said above.
        unsafe { _mm256_load_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m256) {
        // SAFETY: as said above.
        unsafe { _mm256_store_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: as said above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn bf16(from: *const u8) -> [__m256; 2] {
        // SAFETY: as said above.
        unsafe {
            let v = _mm256_loadu_si256(from.cast());
            let odd = _mm256_and_si256(v, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)), _mm256_castsi256_ps(odd)]
        }
    }

    #[inline(always)]
    unsafe fn f32(from: *const u8) -> [__m256; 2] {
        // SAFETY: as said above.
        unsafe {
            let (a, b) = (_mm256_loadu_ps(from.cast()), _mm256_loadu_ps(from.add(32).cast()));
            // Within each half of a register the shuffle keeps order; the permutation joins the halves.
            let even = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0b10_00_10_00));
            let odd = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0b11_01_11_01));
            [
                _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0b11_01_10_00)),
                _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0b11_01_10_00)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn int8(from: *const u8) -> [__m256; 2] {
        // SAFETY: as said above.
        unsafe {
            let v = _mm256_cvtepi16_epi32(_mm_loadu_si128(from.cast()));
            let even = _mm256_srai_epi32(_mm256_slli_epi32(v, 24), 24);
            [_mm256_cvtepi32_ps(even), _mm256_cvtepi32_ps(_mm256_srai_epi32(v, 8))]
        }
    }

    #[inline(always)]
    unsafe fn mxfp4(from: *const u8, scale: f32) -> [__m256; 2] {
        // SAFETY: as said above. The table has 16 entries, of which the first 8 are the magnitudes.
        unsafe {
            // The table is scaled once a block, so a lookup gives the finished weight but for its sign.
            let table = _mm256_mul_ps(_mm256_loadu_ps(E2M1.as_ptr()), _mm256_set1_ps(scale));
            // Bit 31 is the sign of the odd column. An index counts by its three low bits only.
            let v = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()));
            let odd = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(v, 4));
            let odd_sign = _mm256_and_si256(v, _mm256_set1_epi32(i32::MIN));
            // Shifted by 28, the even nibble's sign comes to its place, and its index to bits 28 to 30. Each entry of
            // this table has its own index there already, so that exclusive or leaves the sign alone.
            let index = _mm256_setr_epi32(0, 1 << 28, 2 << 28, 3 << 28, 4 << 28, 5 << 28, 6 << 28, 7 << 28);
            let table = _mm256_xor_ps(table, _mm256_castsi256_ps(index));
            let even = _mm256_permutevar8x32_ps(table, v);
            [
                _mm256_xor_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(v, 28))),
                _mm256_xor_ps(odd, _mm256_castsi256_ps(odd_sign)),
            ]
        }
    }
}

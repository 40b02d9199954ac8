use super::few::{FEW_ROWS, few};
use super::form::{Form, with_kind};
use super::tiles::many;
use super::{Output, Packed};
use crate::format::{E2M1, Matrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// # Safety
/// As for `super::matmul`; AVX-512 F, BW, DQ and VL.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn matmul(w: &Matrix, outputs: Range<usize>, x: &Packed, y: Output) {
    // SAFETY: the caller's promise.
    with_kind!(w, K, stored => unsafe {
        if x.rows() <= FEW_ROWS {
            few::<Avx512, K>(stored, outputs, x, y)
        } else {
            many::<Avx512, K>(stored, outputs, x, y)
        }
    })
}

/// 16 lanes in one register.
struct Avx512;

// SAFETY (all blocks below): the caller's promise that the processor runs this form and on what lies at an address.
impl Form for Avx512 {
    type Reg = __m512;
    const PARTS: usize = 1;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: as said above.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: as said above.
        unsafe { _mm512_load_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        // SAFETY: as said above.
        unsafe { _mm512_store_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as said above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn bf16(from: *const u8) -> [__m512; 2] {
        // SAFETY: as said above.
        unsafe {
            let v = _mm512_loadu_si512(from.cast());
            let odd = _mm512_and_si512(v, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), _mm512_castsi512_ps(odd)]
        }
    }

    #[inline(always)]
    unsafe fn f32(from: *const u8) -> [__m512; 2] {
        // SAFETY: as said above.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(from.cast()), _mm512_loadu_ps(from.add(64).cast()));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            [
                _mm512_permutex2var_ps(low, even, high),
                _mm512_permutex2var_ps(low, odd, high),
            ]
        }
    }

    #[inline(always)]
    unsafe fn int8(from: *const u8) -> [__m512; 2] {
        // SAFETY: as said above.
        unsafe {
            let v = _mm512_cvtepi16_epi32(_mm256_loadu_si256(from.cast()));
            let even = _mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24);
            [_mm512_cvtepi32_ps(even), _mm512_cvtepi32_ps(_mm512_srai_epi32(v, 8))]
        }
    }

    #[inline(always)]
    unsafe fn mxfp4(from: *const u8, scale: f32) -> [__m512; 2] {
        // SAFETY: as said above.
        unsafe {
            let v = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            // The table is scaled once a block, so a lookup gives the finished weight. Only four bits of an index count.
            let table = _mm512_mul_ps(_mm512_loadu_ps(E2M1.as_ptr()), _mm512_set1_ps(scale));
            [
                _mm512_permutexvar_ps(v, table),
                _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), table),
            ]
        }
    }
}

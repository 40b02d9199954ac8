//! Sixteen f32 lanes in whatever registers there are, for loops that the compiler does not keep in registers by itself.

use crate::format::bf16_to_f32;
use crate::matmul::LANES;

/// Sixteen lanes. Every operation is IEEE arithmetic on each lane by itself, so all forms give the same bits.
///
/// # Safety
/// The processor must run the form whose type this is; that holds for every function here.
pub(crate) trait Lanes: Copy {
    /// Registers that sixteen lanes take.
    const REGISTERS: usize;
    /// Sixteen times `x`.
    unsafe fn splat(x: f32) -> Self;
    /// Sixteen numbers from anywhere.
    unsafe fn load(from: &[f32; LANES]) -> Self;
    /// Sixteen bf16 numbers from anywhere, exactly.
    unsafe fn load_bf16(from: &[u16; LANES]) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// `self * b`.
    unsafe fn mul(self, b: Self) -> Self;
    /// The sixteen numbers.
    unsafe fn store(self) -> [f32; LANES];
}

impl Lanes for [f32; LANES] {
    const REGISTERS: usize = 4;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: &[f32; LANES]) -> Self {
        *from
    }
    #[inline(always)]
    unsafe fn load_bf16(from: &[u16; LANES]) -> Self {
        from.map(bf16_to_f32)
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        std::array::from_fn(|l| self[l].mul_add(b[l], c[l]))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        std::array::from_fn(|l| self[l] * b[l])
    }
    #[inline(always)]
    unsafe fn store(self) -> [f32; LANES] {
        self
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use super::{LANES, Lanes};
    use std::arch::x86_64::*;

    /// Two AVX2 registers.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256, __m256);

    // SAFETY (all blocks below): the caller promises that the processor runs the form; loads and stores are of whole arrays.
    impl Lanes for Avx2 {
        const REGISTERS: usize = 2;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(from: &[f32; LANES]) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: &[u16; LANES]) -> Self {
            // SAFETY: as said above.
            unsafe {
                let half = |at| {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(at).cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                };
                Self(half(0), half(8))
            }
        }
        #[inline(always)]
        unsafe fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
        }
        #[inline(always)]
        unsafe fn mul(self, b: Self) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn store(self) -> [f32; LANES] {
            let mut to = [0.0; LANES];
            // SAFETY: as said above.
            unsafe {
                _mm256_storeu_ps(to.as_mut_ptr(), self.0);
                _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
            }
            to
        }
    }

    /// One AVX-512 register.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    impl Lanes for Avx512 {
        const REGISTERS: usize = 1;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm512_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(from: &[f32; LANES]) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm512_loadu_ps(from.as_ptr())) }
        }
        #[inline(always)]
        unsafe fn load_bf16(from: &[u16; LANES]) -> Self {
            // SAFETY: as said above.
            unsafe {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
            }
        }
        #[inline(always)]
        unsafe fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm512_fmadd_ps(self.0, b.0, c.0)) }
        }
        #[inline(always)]
        unsafe fn mul(self, b: Self) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm512_mul_ps(self.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn store(self) -> [f32; LANES] {
            let mut to = [0.0; LANES];
            // SAFETY: as said above.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) };
            to
        }
    }
}

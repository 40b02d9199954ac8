//! One vector register of f32 in each form, for loops that the compiler does not keep in registers by itself.

use crate::matmul::{Lane, tree};

/// Sets of lanes that [`Register::trees`] adds together.
pub(crate) const TREES: usize = 8;

/// A register. Every operation is IEEE arithmetic on each number by itself, so all forms give the same bits.
///
/// # Safety
/// The processor must run the form whose type this is, and `WIDTH` numbers lie at each address; that holds for every
/// function here. Addresses need no alignment, but are met fastest at a multiple of a register's size.
pub(crate) trait Register: Copy {
    /// Numbers of a register; divides the number of lanes.
    const WIDTH: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// `self * b + c`, rounded once.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// `self * b`.
    unsafe fn mul(self, b: Self) -> Self;
    /// `self - b`.
    unsafe fn sub(self, b: Self) -> Self;
    /// The sum of each set of lanes, in the order of [`tree`].
    unsafe fn trees(sets: &[Lane; TREES]) -> [f32; TREES];
}

/// Asks for the line at an address, which need not be valid, into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and every x86-64 has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Numbers of a register of the plain form: as many as the smallest vector registers hold.
const PLAIN: usize = 4;
/// A register of the plain form.
pub(crate) type Plain = [f32; PLAIN];

impl Register for Plain {
    const WIDTH: usize = PLAIN;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        [x; PLAIN]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self>().write_unaligned(self) }
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
    unsafe fn sub(self, b: Self) -> Self {
        std::array::from_fn(|l| self[l] - b[l])
    }
    #[inline(always)]
    unsafe fn trees(sets: &[Lane; TREES]) -> [f32; TREES] {
        std::array::from_fn(|i| tree(sets[i].0))
    }
}

/// Compiles a definition in terms of a [`Register`] three times, as [`multiversion!`](crate::isa::multiversion) does a plain one; the
/// first name stands for the form's register. The function gains a leading `isa` argument and is unsafe: the processor must run `isa`.
macro_rules! with_register {
    ($register:ident => $(#[$meta:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The processor must run `isa`.
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: $crate::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                type $register = $crate::registers::x86::Avx2;
                // SAFETY: this function has the features of its form.
                unsafe { $body }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                type $register = $crate::registers::x86::Avx512;
                // SAFETY: this function has the features of its form.
                unsafe { $body }
            }
            type $register = $crate::registers::Plain;
            // SAFETY: the caller promises that the processor runs `isa`.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Avx512 => avx512($($arg),*),
                    _ => $body,
                }
            }
        }
    };
}
pub(crate) use with_register;

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use super::{Lane, Register, TREES};
    use std::arch::x86_64::*;

    /// An AVX2 register.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256);

    // SAFETY (all blocks below): the caller promises that the processor runs the form and what lies at an address.
    impl Register for Avx2 {
        const WIDTH: usize = 8;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm256_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm256_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as said above.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm256_fmadd_ps(self.0, b.0, c.0)) }
        }
        #[inline(always)]
        unsafe fn mul(self, b: Self) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm256_mul_ps(self.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn sub(self, b: Self) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm256_sub_ps(self.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn trees(sets: &[Lane; TREES]) -> [f32; TREES] {
            let mut to = [0.0; TREES];
            // SAFETY: as said above; the result is an array of whatever alignment.
            unsafe {
                // Two sets of four lanes in a register: set i, then set i + 4.
                let mut quarters = [_mm256_setzero_ps(); 4];
                for (i, quarters) in quarters.iter_mut().enumerate() {
                    let (a, b) = (halved(&sets[i]), halved(&sets[i + 4]));
                    *quarters = _mm256_add_ps(
                        _mm256_permute2f128_ps::<0x20>(a, b),
                        _mm256_permute2f128_ps::<0x31>(a, b),
                    );
                }
                _mm256_storeu_ps(to.as_mut_ptr(), sums(quarters));
            }
            to
        }
    }

    /// `l + (l + 8)` for each of eight lanes.
    #[inline(always)]
    unsafe fn halved(set: &Lane) -> __m256 {
        // SAFETY: as said above; a set is aligned.
        unsafe { _mm256_add_ps(_mm256_load_ps(set.0.as_ptr()), _mm256_load_ps(set.0.as_ptr().add(8))) }
    }

    /// `l + (l + 2)` for each of two lanes, of the sets of four lanes in each half of `a` and `b`: those of `a`, then of `b`.
    #[inline(always)]
    unsafe fn pairs(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as said above.
        unsafe {
            let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
            let low = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            _mm256_add_ps(low, _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)))
        }
    }

    /// Each register holds a set of four lanes in each half. The sums of the lower halves of all four, then of the upper.
    #[inline(always)]
    unsafe fn sums([a, b, c, d]: [__m256; 4]) -> __m256 {
        // SAFETY: as said above.
        unsafe {
            let (a, c) = (pairs(a, b), pairs(c, d));
            _mm256_add_ps(
                _mm256_shuffle_ps::<0b10_00_10_00>(a, c),
                _mm256_shuffle_ps::<0b11_01_11_01>(a, c),
            )
        }
    }

    /// An AVX-512 register.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    impl Register for Avx512 {
        const WIDTH: usize = 16;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm512_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm512_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as said above.
            unsafe { _mm512_storeu_ps(to, self.0) }
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
        unsafe fn sub(self, b: Self) -> Self {
            // SAFETY: as said above.
            unsafe { Self(_mm512_sub_ps(self.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn trees(sets: &[Lane; TREES]) -> [f32; TREES] {
            let mut to = [0.0; TREES];
            // SAFETY: as said above; the result is an array of whatever alignment.
            unsafe {
                let (a, b) = (quarters(sets, 0), quarters(sets, 1));
                let [a, c] = halves(a);
                let [b, d] = halves(b);
                _mm256_storeu_ps(to.as_mut_ptr(), sums([a, b, c, d]));
            }
            to
        }
    }

    /// `l + (l + 8)` for each of eight lanes of two sets.
    #[inline(always)]
    unsafe fn both_halved(a: &Lane, b: &Lane) -> __m512 {
        // SAFETY: as said above; a set is aligned.
        unsafe {
            let (a, b) = (_mm512_load_ps(a.0.as_ptr()), _mm512_load_ps(b.0.as_ptr()));
            _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
            )
        }
    }

    /// Four lanes of the sets `i`, `i + 4`, `i + 2` and `i + 6`.
    #[inline(always)]
    unsafe fn quarters(sets: &[Lane; TREES], i: usize) -> __m512 {
        // SAFETY: as said above.
        unsafe {
            let a = both_halved(&sets[i], &sets[i + 4]);
            let b = both_halved(&sets[i + 2], &sets[i + 6]);
            _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
            )
        }
    }

    /// The lower and the upper half of a register.
    #[inline(always)]
    unsafe fn halves(v: __m512) -> [__m256; 2] {
        // SAFETY: as said above.
        unsafe {
            let upper = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v));
            [_mm512_castps512_ps256(v), _mm256_castpd_ps(upper)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::testing::numbers;

    with_register! { R =>
        unsafe fn trees(sets: &[Lane; TREES]) -> [f32; TREES] { R::trees(sets) }
    }

    #[test]
    fn trees_together_are_trees_one_by_one() {
        let mut sets = [Lane::default(); TREES];
        for seed in 0..50 {
            let all = numbers(3.0, 16 * TREES, seed);
            for (set, all) in sets.iter_mut().zip(all.as_chunks::<16>().0) {
                set.0 = *all;
            }
            let want = sets.map(|set| tree(set.0).to_bits());
            for isa in Isa::available() {
                // SAFETY: the form is available.
                let got = unsafe { trees(isa, &sets) };
                assert_eq!(got.map(f32::to_bits), want, "{isa}");
            }
        }
    }
}

use std::fmt;

/// Which instructions the kernels use. Every choice gives the same bits; only the time differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// The plain definitions, compiled for the target's baseline. This is the form that Arm uses.
    Plain,
    /// x86-64 with AVX2 and FMA: 8 lanes of f32.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL: 16 lanes of f32.
    Avx512,
}

impl Isa {
    /// The fastest form that this processor runs.
    pub fn detect() -> Self {
        *Self::available().last().unwrap_or(&Isa::Plain)
    }

    /// Every form that this processor runs, slowest first. `Plain` is always among them.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Isa::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(Isa::Avx2);
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    all.push(Isa::Avx512);
                }
            }
        }
        all
    }

    /// Panics unless this processor runs `self`. A back end calls it once; after that the kernels may rely on it.
    pub(crate) fn assert_available(self) {
        assert!(
            Self::available().contains(&self),
            "this processor does not run the {self} kernels"
        );
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Plain => "plain",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}

/// Compiles one plain definition three times: for the baseline, for AVX2 with FMA and for AVX-512. The text is the
/// same and IEEE arithmetic leaves the compiler no freedom, so the three give the same bits. The function gains a
/// leading `isa` argument and is unsafe: the processor must run `isa`.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The processor must run `isa`.
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: $crate::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

            match isa {
                $crate::Isa::Plain => body($($arg),*),
                // SAFETY: the caller promises that the processor runs `isa`.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: the caller promises that the processor runs `isa`.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(not(target_arch = "x86_64"))]
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use multiversion;

//! What the machine gives, measured beside what is compared with it: memory's read bandwidth and the multiply-add peak.

use kernels::Isa;
use std::hint::black_box;
use std::time::Instant;

/// The middle one.
pub fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

/// Seconds that something takes.
pub fn seconds(mut f: impl FnMut()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// Bytes per second of reading `data` on all threads of a scope.
pub fn read_bandwidth(data: &[u8], threads: usize) -> f64 {
    let part = data.len() / threads;
    let t = seconds(|| {
        std::thread::scope(|s| {
            for p in data.chunks(part).take(threads) {
                s.spawn(move || black_box(sum(p)));
            }
        })
    });
    (part * threads) as f64 / t
}

#[cfg(target_arch = "x86_64")]
fn sum(p: &[u8]) -> u64 {
    #[target_feature(enable = "avx512f")]
    fn wide(p: &[u8]) -> u64 {
        use std::arch::x86_64::*;
        let mut acc = [_mm512_setzero_si512(); 8];
        for c in p.chunks_exact(512) {
            for (i, acc) in acc.iter_mut().enumerate() {
                // SAFETY: 512 bytes a chunk.
                *acc = _mm512_or_si512(*acc, unsafe { _mm512_loadu_si512(c.as_ptr().add(64 * i).cast()) });
            }
        }
        let all = acc.into_iter().reduce(|a, b| _mm512_or_si512(a, b)).unwrap();
        _mm512_reduce_or_epi64(all) as u64
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: just checked.
        return unsafe { wide(p) };
    }
    p.chunks_exact(8)
        .fold(0, |a, c| a | u64::from_le_bytes(c.try_into().unwrap()))
}

#[cfg(not(target_arch = "x86_64"))]
fn sum(p: &[u8]) -> u64 {
    p.chunks_exact(8)
        .fold(0, |a, c| a | u64::from_le_bytes(c.try_into().unwrap()))
}

/// Operations of multiply-adds (two each) per second with the registers of `isa`, on `threads` threads.
pub fn fma_peak(isa: Isa, threads: usize) -> f64 {
    const STEPS: usize = 4_000_000;
    const CHAINS: usize = 12;
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn avx512() -> f32 {
        use std::arch::x86_64::*;
        let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(1e-3)));
        let mut acc = [_mm512_set1_ps(1.0); CHAINS];
        for _ in 0..STEPS {
            for acc in &mut acc {
                *acc = _mm512_fmadd_ps(a, *acc, b);
            }
        }
        acc.iter().map(|v| _mm512_reduce_add_ps(*v)).sum()
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2() -> f32 {
        use std::arch::x86_64::*;
        let (a, b) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(1e-3)));
        let mut acc = [_mm256_set1_ps(1.0); CHAINS];
        for _ in 0..STEPS {
            for acc in &mut acc {
                *acc = _mm256_fmadd_ps(a, *acc, b);
            }
        }
        acc.iter().map(|v| _mm_cvtss_f32(_mm256_castps256_ps128(*v))).sum()
    }
    let run = || {
        // SAFETY: the form is available.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            match isa {
                Isa::Avx512 => return avx512(),
                Isa::Avx2 => return avx2(),
                Isa::Plain => {}
            }
        }
        let (a, b) = (black_box(0.999_f32), black_box(1e-3_f32));
        (0..STEPS).fold(1.0, |acc, _| a.mul_add(acc, b))
    };
    let lanes = match isa {
        Isa::Avx512 => 16 * CHAINS,
        Isa::Avx2 => 8 * CHAINS,
        Isa::Plain => 1,
    };
    let t = seconds(|| {
        std::thread::scope(|s| {
            (0..threads).for_each(|_| {
                s.spawn(|| black_box(run()));
            })
        })
    });
    (threads * STEPS * lanes * 2) as f64 / t
}

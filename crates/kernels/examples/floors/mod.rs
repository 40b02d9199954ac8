//! What the machine gives, measured beside what is compared with it: memory's read bandwidth and the multiply-add peak.
//!
//! On a machine that is shared with others both swing between readings, by a third and more. A limit is a maximum, so the
//! best reading of the whole run counts: the shares are then too low rather than too high, and comparable with each other. Bandwidth belongs to a
//! number of threads, whatever their instructions; the peak to an instruction set and a number of threads.

use kernels::Isa;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

/// Read for the bandwidth: beyond any cache of the machines that we know.
pub const PROBE_BYTES: usize = 1 << 30;

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

/// The readings so far.
pub struct Floors {
    probe: Vec<u8>,
    readings: usize,
    bandwidth: BTreeMap<usize, Vec<f64>>,
    peak: BTreeMap<(String, usize), Vec<f64>>,
}

impl Floors {
    /// Without readings.
    pub fn new() -> Self {
        Self {
            probe: (0..PROBE_BYTES).map(|i| i as u8).collect(),
            readings: 0,
            bandwidth: BTreeMap::new(),
            peak: BTreeMap::new(),
        }
    }

    /// Reads the memory once on `threads` threads, in the ways of [`WAYS`] by turns, and returns this reading in bytes per second.
    pub fn read(&mut self, threads: usize) -> f64 {
        let way = WAYS[self.readings % WAYS.len()];
        self.readings += 1;
        let part = self.probe.len() / threads;
        let t = seconds(|| {
            std::thread::scope(|s| {
                for p in self.probe.chunks(part).take(threads) {
                    s.spawn(move || black_box(way(p)));
                }
            })
        });
        let reading = (part * threads) as f64 / t;
        self.bandwidth.entry(threads).or_default().push(reading);
        reading
    }

    /// Multiplies and adds for some milliseconds, and returns this reading in operations per second.
    pub fn multiply(&mut self, isa: Isa, threads: usize) -> f64 {
        let reading = fma_rate(isa, threads);
        self.peak.entry((isa.to_string(), threads)).or_default().push(reading);
        reading
    }

    /// Bytes per second that `threads` threads can read: the best of all readings.
    pub fn bandwidth(&self, threads: usize) -> f64 {
        best(&self.bandwidth[&threads])
    }

    /// Operations per second of multiply-adds (two each) that `threads` threads can do: the best of all readings.
    pub fn peak(&self, isa: Isa, threads: usize) -> f64 {
        best(&self.peak[&(isa.to_string(), threads)])
    }

    /// The middle readings of both: what the machine gave beside what was measured, when others took part of it.
    #[allow(dead_code)] // Not each bench asks.
    pub fn middle(&self, isa: Isa, threads: usize) -> (f64, f64) {
        let bandwidth = self.bandwidth[&threads].clone();
        (
            median(bandwidth),
            median(self.peak[&(isa.to_string(), threads)].clone()),
        )
    }
}

fn best(readings: &[f64]) -> f64 {
    readings.iter().copied().fold(0.0, f64::max)
}

/// Ways to read: which is the fastest differs between machines and numbers of threads.
const WAYS: [fn(&[u8]) -> u64; 3] = [or_lines::<1, 0>, or_lines::<1, 4096>, or_lines::<4, 1024>];

/// Reads lines of 64 bytes from `STREAMS` places in turn, and asks for the line that lies `AHEAD` bytes further if that is not 0.
fn or_lines<const STREAMS: usize, const AHEAD: usize>(p: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn avx512<const STREAMS: usize, const AHEAD: usize>(p: &[u8]) -> u64 {
            or_lines_inner::<STREAMS, AHEAD>(p)
        }
        #[target_feature(enable = "avx2")]
        fn avx2<const STREAMS: usize, const AHEAD: usize>(p: &[u8]) -> u64 {
            or_lines_inner::<STREAMS, AHEAD>(p)
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: just checked.
            return unsafe { avx512::<STREAMS, AHEAD>(p) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: just checked.
            return unsafe { avx2::<STREAMS, AHEAD>(p) };
        }
    }
    or_lines_inner::<STREAMS, AHEAD>(p)
}

#[inline(always)]
fn or_lines_inner<const STREAMS: usize, const AHEAD: usize>(p: &[u8]) -> u64 {
    const LINE: usize = 64;
    let mut lines: [_; STREAMS] = std::array::from_fn(|s| {
        let part = p.len() / STREAMS;
        p[s * part..(s + 1) * part].chunks_exact(LINE)
    });
    let mut acc = [[0_u64; LINE / 8]; STREAMS];
    for _ in 0..p.len() / STREAMS / LINE {
        for (acc, lines) in acc.iter_mut().zip(&mut lines) {
            let line = lines.next().unwrap_or_default();
            #[cfg(target_arch = "x86_64")]
            if AHEAD > 0 {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                // SAFETY: a prefetch of any address does nothing but fill caches.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast()) };
            }
            for (acc, word) in acc.iter_mut().zip(line.chunks_exact(8)) {
                *acc |= u64::from_le_bytes(word.try_into().unwrap());
            }
        }
    }
    acc.as_flattened().iter().fold(0, |all, word| all | word)
}

fn fma_rate(isa: Isa, threads: usize) -> f64 {
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

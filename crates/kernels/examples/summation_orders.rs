//! Measures two candidate orders of summation for MXFP4 products, before one of them became the definition
//! (`docs/numerics.md`, section 2).
//!
//! - order (a): 16 lanes over k inside one output row, then a fixed tree. Bytes are used as they lie in the file.
//! - order (b): one ascending chain per output, 16 output rows in the lanes. Needs rows interleaved by 16 first.
//!
//! `cargo run --release -p kernels --example summation_orders` prints one line per case: packed GB/s of one core.

#[cfg(target_arch = "x86_64")]
// Register arrays are clearer by index.
#[allow(clippy::needless_range_loop, clippy::missing_safety_doc)]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;
    use std::time::Instant;

    const E2M1: [f32; 16] = [
        0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
    ];

    /// One expert matrix: `rows x k` nibbles, `rows x k/32` scale bytes.
    pub struct Matrix {
        pub rows: usize,
        pub k: usize,
        pub packed: Vec<u8>,
        pub scale: Vec<u8>,
    }

    impl Matrix {
        pub fn new(rows: usize, k: usize, seed: u64) -> Self {
            let mut s = seed;
            let mut byte = || {
                s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (s >> 56) as u8
            };
            let packed = (0..rows * k / 2).map(|_| byte()).collect();
            let scale = (0..rows * k / 32).map(|_| 119 + byte() % 3).collect();
            Self { rows, k, packed, scale }
        }
        pub fn bytes(&self) -> usize {
            self.packed.len() + self.scale.len()
        }
    }

    fn scales() -> [f32; 256] {
        std::array::from_fn(|s| {
            if s == 0 {
                f32::from_bits(0x0040_0000)
            } else {
                f32::from_bits((s as u32) << 23)
            }
        })
    }

    /// Order (a), `M` activation rows, 4 output rows at a time. `x` holds, per block of 32 columns, the 16 even
    /// then the 16 odd ones.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn order_a<const M: usize>(w: &Matrix, x: &[f32], y: &mut [f32], scales: &[f32; 256]) {
        // SAFETY: all offsets stay inside the vectors by the loop bounds; rows is a multiple of 4.
        unsafe {
            let blocks = w.k / 32;
            let table = _mm512_loadu_ps(E2M1.as_ptr());
            for r in (0..w.rows).step_by(4) {
                let mut acc = [[_mm512_setzero_ps(); M]; 4];
                for b in 0..blocks {
                    for i in 0..4 {
                        let row = r + i;
                        let p =
                            _mm512_cvtepu8_epi32(_mm_loadu_si128(w.packed.as_ptr().add(row * w.k / 2 + b * 16).cast()));
                        let s = _mm512_set1_ps(scales[*w.scale.get_unchecked(row * blocks + b) as usize]);
                        let t = _mm512_mul_ps(table, s);
                        let even = _mm512_permutexvar_ps(p, t);
                        let odd = _mm512_permutexvar_ps(_mm512_srli_epi32(p, 4), t);
                        for m in 0..M {
                            let xp = x.as_ptr().add(m * w.k + b * 32);
                            acc[i][m] = _mm512_fmadd_ps(even, _mm512_loadu_ps(xp), acc[i][m]);
                            acc[i][m] = _mm512_fmadd_ps(odd, _mm512_loadu_ps(xp.add(16)), acc[i][m]);
                        }
                    }
                }
                for i in 0..4 {
                    for m in 0..M {
                        y[m * w.rows + r + i] = _mm512_reduce_add_ps(acc[i][m]);
                    }
                }
            }
        }
    }

    /// Rows interleaved by 16: per group of 16 rows and block of 32 columns, 4 vectors of 16 dwords (lane = row,
    /// 8 nibbles each), then 16 scale bytes.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn interleave(w: &Matrix, out: &mut Vec<u32>, out_scale: &mut Vec<u8>) {
        let dwords = w.k / 8;
        let blocks = w.k / 32;
        out.resize(w.rows * dwords, 0);
        out_scale.resize(w.rows * blocks, 0);
        // SAFETY: rows is a multiple of 16 and k of 128, so every load and store is inside the vectors.
        unsafe {
            for g in 0..w.rows / 16 {
                for d in (0..dwords).step_by(16) {
                    let mut v: [__m512i; 16] = std::array::from_fn(|i| {
                        _mm512_loadu_si512(w.packed.as_ptr().add(((g * 16 + i) * dwords + d) * 4).cast())
                    });
                    transpose(&mut v);
                    for (j, v) in v.iter().enumerate() {
                        _mm512_storeu_si512(out.as_mut_ptr().add((g * dwords + d + j) * 16).cast(), *v);
                    }
                }
                for b in 0..blocks {
                    for i in 0..16 {
                        out_scale[(g * blocks + b) * 16 + i] = w.scale[(g * 16 + i) * blocks + b];
                    }
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    fn transpose(v: &mut [__m512i; 16]) {
        let mut t = [_mm512_setzero_si512(); 16];
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
        }
        for i in 0..4 {
            v[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
            v[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
            v[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
            v[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
        }
        for i in 0..4 {
            t[i] = _mm512_shuffle_i32x4(v[i], v[4 + i], 0x88);
            t[4 + i] = _mm512_shuffle_i32x4(v[i], v[4 + i], 0xdd);
            t[8 + i] = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0x88);
            t[12 + i] = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0xdd);
        }
        for i in 0..4 {
            v[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
            v[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
            v[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
            v[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
        }
    }

    /// Order (b) over interleaved rows, `M` activation rows, `G` groups of 16 outputs at a time.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn order_b<const M: usize, const G: usize>(
        rows: usize,
        k: usize,
        w: &[u32],
        scale: &[u8],
        x: &[f32],
        y: &mut [f32],
    ) {
        let blocks = k / 32;
        let dwords = k / 8;
        // SAFETY: rows is a multiple of 16 G and k of 32, so every access is inside the slices.
        unsafe {
            let table = _mm512_loadu_ps(E2M1.as_ptr());
            for g in (0..rows / 16).step_by(G) {
                let mut acc = [[_mm512_setzero_ps(); M]; G];
                for b in 0..blocks {
                    for i in 0..G {
                        let s = _mm512_cvtepu8_epi32(_mm_loadu_si128(
                            scale.as_ptr().add(((g + i) * blocks + b) * 16).cast(),
                        ));
                        let s = _mm512_castsi512_ps(_mm512_slli_epi32(s, 23));
                        let mut t = [_mm512_setzero_ps(); M];
                        for j in 0..4 {
                            let mut v = _mm512_loadu_si512(w.as_ptr().add(((g + i) * dwords + b * 4 + j) * 16).cast());
                            for n in 0..8 {
                                let q = _mm512_permutexvar_ps(v, table);
                                v = _mm512_srli_epi32(v, 4);
                                for m in 0..M {
                                    t[m] = _mm512_fmadd_ps(
                                        q,
                                        _mm512_set1_ps(*x.get_unchecked(m * k + b * 32 + j * 8 + n)),
                                        t[m],
                                    );
                                }
                            }
                        }
                        for m in 0..M {
                            acc[i][m] = _mm512_fmadd_ps(t[m], s, acc[i][m]);
                        }
                    }
                }
                for i in 0..G {
                    for m in 0..M {
                        _mm512_storeu_ps(y.as_mut_ptr().add(m * rows + (g + i) * 16), acc[i][m]);
                    }
                }
            }
        }
    }

    fn best(bytes: usize, mut f: impl FnMut()) -> f64 {
        let mut best = f64::MAX;
        for _ in 0..7 {
            let t = Instant::now();
            f();
            best = best.min(t.elapsed().as_secs_f64());
        }
        bytes as f64 / best / 1e9
    }

    fn case<const M: usize>(name: &str, mats: &[Matrix]) {
        let (rows, k) = (mats[0].rows, mats[0].k);
        let bytes: usize = mats.iter().map(Matrix::bytes).sum();
        let x: Vec<f32> = (0..M * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
        let mut y = vec![0f32; M * rows];
        let sc = scales();
        // SAFETY: main checked the CPU features; shapes are multiples of 64 rows and 128 columns.
        unsafe {
            let a = best(bytes, || {
                mats.iter().for_each(|w| order_a::<M>(black_box(w), &x, &mut y, &sc))
            });
            let mut inter: Vec<(Vec<u32>, Vec<u8>)> = mats.iter().map(|_| Default::default()).collect();
            let i = best(bytes, || {
                mats.iter()
                    .zip(&mut inter)
                    .for_each(|(w, o)| interleave(black_box(w), &mut o.0, &mut o.1))
            });
            let b = best(bytes, || {
                inter.iter().for_each(|o| {
                    if M > 4 {
                        order_b::<M, 2>(rows, k, black_box(&o.0), &o.1, &x, &mut y)
                    } else {
                        order_b::<M, 4>(rows, k, black_box(&o.0), &o.1, &x, &mut y)
                    }
                })
            });
            let both = 1.0 / (1.0 / i + 1.0 / b);
            println!(
                "{name:28} rows {M}: (a) {a:5.1} GB/s   (b) {b:5.1} GB/s, interleaving {i:5.1}, (b) with interleaving {both:5.1}   (a) {:.1} GFLOP/s, (b) {:.1}",
                a * 4.0 / 1.0625 * M as f64,
                b * 4.0 / 1.0625 * M as f64
            );
        }
    }

    pub fn main() {
        if !(is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")) {
            println!("this prototype needs AVX-512");
            return;
        }
        let small = [Matrix::new(128, 3584, 1)];
        let large: Vec<Matrix> = (0..60).map(|i| Matrix::new(3072, 3584, i)).collect();
        case::<1>("in L2 (128 x 3584)", &small);
        case::<4>("in L2 (128 x 3584)", &small);
        case::<6>("in L2 (128 x 3584)", &small);
        case::<1>("from memory (60 matrices)", &large);
        case::<4>("from memory (60 matrices)", &large);
    }
}

fn main() {
    #[cfg(target_arch = "x86_64")]
    x86::main();
    #[cfg(not(target_arch = "x86_64"))]
    println!("this prototype needs AVX-512");
}

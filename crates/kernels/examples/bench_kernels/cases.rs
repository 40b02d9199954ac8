//! What is measured: each kernel at K3's shapes, with the bytes that it must move and the operations that it must do.

use kernels::{
    Backend, Cpu, Elements, ExpertMatrices, ExpertWork, KvFormat, Lane, Matrix, MlaShape, SituCaps, Span, Taker,
    WeightFormat,
};
use std::sync::Arc;

/// Weights of one measurement: beyond any cache of the machines that we know.
const WEIGHT_BYTES: usize = 1 << 30;
/// Activations of one measurement of a kernel without weights.
const ACTIVATION_BYTES: usize = 1 << 28;
/// Operations of one measurement, where its weights are fewer than that takes; at least one matrix is used.
const OPERATIONS: usize = 16_000_000_000;

const HIDDEN: usize = 7168;
const LATENT: usize = 3584;
const INNER: usize = 3072;
const EXPERTS: usize = 896;
const TOP_K: usize = 16;
const HEADS: usize = 96;
const DIM: usize = 128;
const WIDTH: usize = HEADS * DIM;
const TAPS: usize = 4;
const KDA_LAYERS: usize = 69;
/// Closed blocks and the stream, at the last layers.
const SOURCES: usize = 8;
const EPS: f32 = 1e-5;

/// Bytes at a cache line's start, as a loader's buffers are.
struct Aligned(Vec<Lane>);

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the bytes of the lanes, all of which are set.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), size_of_val(&*self.0)) }
    }
}

impl Aligned {
    fn new(bytes: &[u8]) -> Self {
        let lane = |bytes: &[u8]| {
            Lane(std::array::from_fn(|l| {
                f32::from_le_bytes(bytes[4 * l..][..4].try_into().unwrap())
            }))
        };
        Self(bytes.chunks_exact(size_of::<Lane>()).map(lane).collect())
    }
}

/// Random numbers.
pub struct Noise(pub u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut v = vec![0; n];
        v.chunks_mut(8)
            .for_each(|c| c.copy_from_slice(&self.next().to_le_bytes()[..c.len()]));
        v
    }
    /// bf16 numbers in [-1, 1).
    fn bf16(&mut self, n: usize) -> Vec<u8> {
        let mut v = self.bytes(2 * n);
        for b in v.chunks_exact_mut(2) {
            // Sign and mantissa stay random; the exponent becomes one of four below 1.
            b[1] = (b[1] & 0x80) | 0x3e | (b[1] & 1);
        }
        v
    }
}

/// A kernel to measure. Its weights live only from `make` until it is measured.
pub struct Kind {
    pub name: &'static str,
    pub rows: usize,
    pub make: Make,
}

/// Makes a case. The back end only says how things are kept: the case runs on any.
type Make = fn(usize, &mut Noise, &Cpu) -> Case;

/// A kernel with its data, which it takes in turn so that none is in a cache when it is used again.
pub struct Case {
    /// Weights, state and activations that are moved, once each.
    pub bytes: f64,
    /// Multiplications and additions; the exponential function and the like count as nothing.
    pub flops: f64,
    pub run: Box<dyn FnMut(&Cpu)>,
}

/// How often something of `bytes` and `flops` is needed for a measurement.
fn count(bytes: usize, flops: usize) -> usize {
    (WEIGHT_BYTES / bytes).min(OPERATIONS / flops).max(1)
}

fn act(rows: usize, width: usize, noise: &mut Noise, cpu: &Cpu) -> kernels::Rows {
    let mut x = cpu.act(rows, width);
    cpu.upload_bf16(&noise.bf16(rows * width), &mut x);
    x
}

fn linear(rows: usize, format: WeightFormat, noise: &mut Noise, cpu: &Cpu) -> Case {
    // The query projection of KDA; for the largest passes the projection to the latent, which takes less time.
    let (out, cols) = if rows > 64 { (LATENT, HIDDEN) } else { (WIDTH, HIDDEN) };
    let bytes = match format {
        WeightFormat::F32 => out * cols * 4,
        WeightFormat::Bf16 => out * cols * 2,
        WeightFormat::Int8 => out * (cols + 4),
    };
    let count = count(bytes, 2 * rows * out * cols);
    let mut weight = || match format {
        // The upper halves make the numbers; the lower ones are as random as they come.
        WeightFormat::F32 => noise.bf16(2 * out * cols),
        WeightFormat::Bf16 => noise.bf16(out * cols),
        WeightFormat::Int8 => [noise.bytes(out * cols), 0.01_f32.to_le_bytes().repeat(out)].concat(),
    };
    let weights: Vec<_> = (0..count)
        .map(|_| {
            cpu.linear(out, cols, format, Arc::new(Aligned::new(&weight())))
                .unwrap()
        })
        .collect();
    let x = act(rows, cols, noise, cpu);
    let mut y = cpu.act(rows, out);
    Case {
        bytes: (count * bytes) as f64,
        flops: (2 * rows * count * out * cols) as f64,
        run: Box::new(move |cpu| weights.iter().for_each(|w| cpu.matmul(w, &x, &mut y))),
    }
}

/// The bytes of an expert as published and as they land, row after row: nothing is rearranged before, and what the kernel
/// rearranges for itself is in its time.
fn expert(rows: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    const WEIGHTS: usize = LATENT * INNER;
    const PACKED: usize = WEIGHTS / 2;
    const SCALE: usize = WEIGHTS / 32;
    let count = count(3 * (PACKED + SCALE), 2 * rows * 3 * WEIGHTS);
    let mut matrix = || {
        let scale: Vec<u8> = noise.bytes(SCALE).iter().map(|b| 118 + b % 4).collect();
        (Aligned::new(&noise.bytes(PACKED)), Aligned::new(&scale))
    };
    let experts: Vec<_> = (0..count).map(|_| [matrix(), matrix(), matrix()]).collect();
    let x = act(rows, LATENT, noise, cpu);
    let mut results = cpu.act(rows, LATENT);
    let takers: Vec<Taker> = (0..rows).map(|row| Taker { row, place: row }).collect();
    Case {
        bytes: (count * 3 * (PACKED + SCALE)) as f64,
        flops: (2 * rows * count * 3 * WEIGHTS) as f64,
        run: Box::new(move |cpu| {
            for expert in &experts {
                let m = |i: usize, rows, cols| {
                    let (packed, scale) = (expert[i].0.as_ref(), expert[i].1.as_ref());
                    Matrix::new(rows, cols, Elements::Mxfp4 { packed, scale }).unwrap()
                };
                let w = ExpertMatrices {
                    gate: m(0, INNER, LATENT),
                    up: m(1, INNER, LATENT),
                    down: m(2, LATENT, INNER),
                };
                let caps = SituCaps {
                    beta: 4.0,
                    linear_beta: 25.0,
                };
                let work = ExpertWork {
                    matrices: w,
                    takers: &takers,
                };
                cpu.experts(&[work], caps, &x, &mut results);
            }
        }),
    }
}

fn kda_step(rows: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    const STATE: usize = HEADS * DIM * DIM;
    // Decay, the product with the key, the update and the product with the query.
    const FLOPS: usize = 7 * STATE;
    let layers = count(8 * STATE, FLOPS * rows).min(KDA_LAYERS);
    let mut states: Vec<_> = (0..layers).map(|_| cpu.kda(HEADS, DIM, TAPS)).collect();
    let mut input = |width| act(rows, width, noise, cpu);
    let (q, k, v, mut alpha, mut beta) = (input(WIDTH), input(WIDTH), input(WIDTH), input(WIDTH), input(HEADS));
    cpu.sigmoid(&mut alpha);
    cpu.sigmoid(&mut beta);
    let mut y = cpu.act(rows, WIDTH);
    Case {
        // Read once and written once.
        bytes: (layers * 8 * STATE) as f64,
        flops: (layers * FLOPS * rows) as f64,
        run: Box::new(move |cpu| {
            let spans = [Span { first: 0, rows }];
            states
                .iter_mut()
                .for_each(|s| cpu.delta(&q, &k, &v, &alpha, &beta, &spans, &mut [s], &mut y));
        }),
    }
}

fn attention(rows: usize, format: KvFormat, noise: &mut Noise, cpu: &Cpu) -> Case {
    let shape = MlaShape {
        heads: HEADS,
        nope: 128,
        shared: 64,
        value: 128,
        latent: 512,
    };
    // Many rows see fewer positions, so that it takes bounded time.
    let positions = match rows {
        0..=16 => 8192,
        17..=64 => 2048,
        _ => 1024,
    };
    let width = shape.latent + shape.shared;
    let norm = cpu.vector(vec![1.0; shape.latent]);
    let kv = act(64, width, noise, cpu);
    let visible: usize = (positions - rows + 1..=positions).sum();
    let flops = 2 * shape.heads * visible * (width + shape.latent);
    let bytes = positions * width * format.bytes();
    // One cache of latents fits in a processor's.
    let caches: Vec<_> = (0..count(bytes, flops).min(64))
        .map(|_| {
            let mut cache = cpu.latents(width, format);
            (0..positions / 64)
                .for_each(|_| cpu.append_latents(&kv, &norm, 1e-6, &[Span { first: 0, rows: 64 }], &mut [&mut cache]));
            cache
        })
        .collect();
    let q = act(rows, shape.heads * width, noise, cpu);
    let mut y = cpu.act(rows, shape.heads * shape.latent);
    Case {
        bytes: (caches.len() * bytes) as f64,
        flops: (caches.len() * flops) as f64,
        run: Box::new(move |cpu| {
            for cache in &caches {
                cpu.attend(&q, shape, 0.01, &[Span { first: 0, rows }], &[cache], &mut y);
            }
        }),
    }
}

/// A kernel without weights to speak of, on as many sets of activations as are beyond caches.
fn sets<T: 'static>(
    bytes: usize,
    flops: usize,
    mut make: impl FnMut() -> T,
    run: impl Fn(&Cpu, &mut T) + 'static,
) -> Case {
    let count = (ACTIVATION_BYTES / bytes).max(1);
    let mut all: Vec<T> = (0..count).map(|_| make()).collect();
    Case {
        bytes: (count * bytes) as f64,
        flops: (count * flops) as f64,
        run: Box::new(move |cpu| all.iter_mut().for_each(|set| run(cpu, set))),
    }
}

fn convolution(rows: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    let taps = cpu.vector(vec![0.25; TAPS * WIDTH]);
    // For queries, keys and values: rows read and written, taps, and the last inputs read and written.
    let bytes = 3 * 4 * WIDTH * (2 * rows + TAPS + 2 * (TAPS - 1));
    let make = || {
        let rows = [(); 3].map(|()| act(rows, WIDTH, noise, cpu));
        (rows, cpu.kda(HEADS, DIM, TAPS))
    };
    sets(bytes, 3 * 2 * TAPS * rows * WIDTH, make, move |cpu, (x, state)| {
        cpu.conv(x.each_mut(), [&taps; 3], &[Span { first: 0, rows }], &mut [state])
    })
}

fn decay(rows: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    let (bias, rate) = (cpu.vector(vec![0.5; WIDTH]), cpu.vector(vec![1.0; HEADS]));
    let make = || act(rows, WIDTH, noise, cpu);
    sets(8 * rows * WIDTH, 3 * rows * WIDTH, make, move |cpu, z| {
        cpu.decay(z, &bias, &rate, -5.0)
    })
}

fn norm(rows: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    let w = cpu.vector(vec![1.0; HIDDEN]);
    let make = || (act(rows, HIDDEN, noise, cpu), cpu.act(rows, HIDDEN));
    sets(8 * rows * HIDDEN, 4 * rows * HIDDEN, make, move |cpu, (x, y)| {
        cpu.rms_norm(x, &w, EPS, y)
    })
}

fn head_norm(rows: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    let w = cpu.vector(vec![1.0; DIM]);
    let make = || {
        (
            act(rows, WIDTH, noise, cpu),
            act(rows, WIDTH, noise, cpu),
            cpu.act(rows, WIDTH),
        )
    };
    sets(12 * rows * WIDTH, 5 * rows * WIDTH, make, move |cpu, (x, gate, y)| {
        cpu.head_norm_gate(x, &w, EPS, gate, y)
    })
}

fn mix(rows: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    let w = cpu.vector(vec![0.01; HIDDEN]);
    let make = || {
        let sources: Vec<_> = (0..SOURCES).map(|_| act(rows, HIDDEN, noise, cpu)).collect();
        (sources, cpu.act(rows, HIDDEN))
    };
    // The product with `w`, the sum of squares, and the weighted sum.
    let flops = 6 * SOURCES * rows * HIDDEN;
    sets(
        4 * (SOURCES + 1) * rows * HIDDEN,
        flops,
        make,
        move |cpu, (sources, y)| cpu.mix(&sources.iter().collect::<Vec<_>>(), &w, EPS, y),
    )
}

fn route(rows: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    let bias = cpu.vector(vec![0.0; EXPERTS]);
    let make = || act(rows, EXPERTS, noise, cpu);
    let bytes = rows * (4 * EXPERTS + 8 * TOP_K);
    sets(bytes, rows * EXPERTS, make, move |cpu, logits| {
        std::hint::black_box(cpu.route(logits, &bias, TOP_K, 2.5));
    })
}

fn combine(rows: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    let bias = cpu.vector(vec![0.0; EXPERTS]);
    let routes = cpu.route(&act(rows, EXPERTS, noise, cpu), &bias, TOP_K, 2.5);
    let make = || (act(rows * TOP_K, LATENT, noise, cpu), cpu.act(rows, LATENT));
    let bytes = 4 * rows * (TOP_K + 1) * LATENT;
    sets(bytes, 2 * rows * TOP_K * LATENT, make, move |cpu, (results, y)| {
        cpu.combine(&routes, results, y)
    })
}

/// All that is measured.
pub fn kinds() -> Vec<Kind> {
    const ALL: &[usize] = &[1, 4, 16, 64, 512];
    // Few rows of these take microseconds, and the fork and join is their time.
    const SOME: &[usize] = &[1, 16, 512];
    let kernels: [(&str, &[usize], Make); 14] = [
        ("bf16 product", ALL, |rows, n, cpu| {
            linear(rows, WeightFormat::Bf16, n, cpu)
        }),
        ("f32 product", ALL, |rows, n, cpu| {
            linear(rows, WeightFormat::F32, n, cpu)
        }),
        ("int8 product", ALL, |rows, n, cpu| {
            linear(rows, WeightFormat::Int8, n, cpu)
        }),
        ("mxfp4 expert, as landed", ALL, expert),
        ("kda step", ALL, kda_step),
        ("mla attention", ALL, |rows, n, cpu| {
            attention(rows, KvFormat::F32, n, cpu)
        }),
        ("mla attention, bf16 latents", ALL, |rows, n, cpu| {
            attention(rows, KvFormat::Bf16, n, cpu)
        }),
        ("convolution", SOME, convolution),
        ("decay", SOME, decay),
        ("norm", SOME, norm),
        ("head norm and gate", SOME, head_norm),
        ("residual mix", SOME, mix),
        ("router top-k", SOME, route),
        ("combine", SOME, combine),
    ];
    let all = kernels
        .into_iter()
        .flat_map(|(name, rows, make)| rows.iter().map(move |&rows| Kind { name, rows, make }));
    all.collect()
}

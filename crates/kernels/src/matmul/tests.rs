use super::*;
use crate::format::Elements;
use proptest::prelude::*;

/// Seeded bytes without the scale byte 255; bf16 and f32 values are kept finite and of moderate size.
struct Weights {
    bytes: Vec<u8>,
    scale: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Bf16,
    F32,
    Int8,
    Mxfp4,
}

fn noise(seed: u64) -> impl FnMut() -> u64 {
    let mut s = seed | 1;
    move || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        s
    }
}

fn number(bits: u64) -> f32 {
    ((bits >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * [1.0, 1e-3, 30.0, 1e-20][(bits & 3) as usize]
}

impl Weights {
    fn new(kind: Kind, rows: usize, cols: usize, seed: u64) -> Self {
        let mut next = noise(seed);
        let n = rows * cols;
        let (bytes, scale) = match kind {
            Kind::Bf16 => (
                (0..n)
                    .flat_map(|_| ((number(next()).to_bits() >> 16) as u16).to_le_bytes())
                    .collect(),
                vec![],
            ),
            Kind::F32 => ((0..n).flat_map(|_| number(next()).to_le_bytes()).collect(), vec![]),
            Kind::Int8 => (
                (0..n).map(|_| next() as u8).collect(),
                (0..rows).flat_map(|_| number(next()).to_le_bytes()).collect(),
            ),
            Kind::Mxfp4 => (
                (0..n / 2).map(|_| next() as u8).collect(),
                (0..n / 32)
                    .map(|_| [0, 1, 90, 121, 127, 140][next() as usize % 6])
                    .collect(),
            ),
        };
        Self { bytes, scale }
    }

    fn matrix(&self, kind: Kind, rows: usize, cols: usize) -> Matrix<'_> {
        let elements = match kind {
            Kind::Bf16 => Elements::Bf16(&self.bytes),
            Kind::F32 => Elements::F32(&self.bytes),
            Kind::Int8 => Elements::Int8 {
                data: &self.bytes,
                scale: &self.scale,
            },
            Kind::Mxfp4 => Elements::Mxfp4 {
                packed: &self.bytes,
                scale: &self.scale,
            },
        };
        Matrix::new(rows, cols, elements).unwrap()
    }
}

fn product(isa: Isa, w: &Matrix, x: &Packed, splits: &[usize]) -> Vec<u32> {
    let mut y = vec![f32::NAN; x.rows() * w.rows()];
    let out = Output::new(&mut y, x.rows(), w.rows());
    let mut from = 0;
    for &to in splits.iter().chain([&w.rows()]) {
        let to = to.clamp(from, w.rows());
        // SAFETY: the form is available and `y` covers all outputs.
        unsafe { matmul(isa, w, from..to, x, out) };
        from = to;
    }
    y.into_iter().map(f32::to_bits).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Every form gives the plain bits, for odd sizes, any number of rows and any split of the outputs, and a row's
    /// result does not change with its company.
    #[test]
    fn every_form_equals_the_plain_one(
        kind in prop_oneof![Just(Kind::Bf16), Just(Kind::F32), Just(Kind::Int8), Just(Kind::Mxfp4)],
        rows in 1usize..80, cols in 1usize..1200, m in prop_oneof![1usize..8, 1usize..71], seed: u64, cut in 0usize..40,
    ) {
        let cols = if matches!(kind, Kind::Mxfp4) { cols.div_ceil(32) * 32 } else { cols };
        let weights = Weights::new(kind, rows, cols, seed);
        let w = weights.matrix(kind, rows, cols);
        let mut next = noise(seed ^ 0x55);
        let x: Vec<f32> = (0..m * cols).map(|_| number(next())).collect();
        let mut packed = Packed::default();
        packed.pack(m, cols, |i| &x[i * cols..]);
        let want = product(Isa::Plain, &w, &packed, &[]);
        for isa in Isa::available() {
            prop_assert_eq!(&product(isa, &w, &packed, &[cut]), &want, "{} {}", isa, w);
            let mut one = Packed::default();
            for i in [0, m / 2, m - 1] {
                one.pack(1, cols, |_| &x[i * cols..]);
                prop_assert_eq!(&product(isa, &w, &one, &[])[..], &want[i * rows..(i + 1) * rows], "row {} alone", i);
            }
        }
    }
}

/// More rows than one block of rows holds: rows keep their results.
#[test]
fn many_blocks_of_rows() {
    let (rows, cols, m) = (70, 96, 200);
    let weights = Weights::new(Kind::Bf16, rows, cols, 5);
    let w = weights.matrix(Kind::Bf16, rows, cols);
    let mut next = noise(6);
    let x: Vec<f32> = (0..m * cols).map(|_| number(next())).collect();
    let mut packed = Packed::default();
    packed.pack(m, cols, |i| &x[i * cols..]);
    let want = product(Isa::Plain, &w, &packed, &[]);
    for isa in Isa::available() {
        assert_eq!(product(isa, &w, &packed, &[3]), want, "{isa}");
    }
}

/// Each row's results go to its place and nowhere else.
#[test]
fn rows_go_to_their_places() {
    let (rows, cols) = (5, 64);
    let weights = Weights::new(Kind::Int8, rows, cols, 5);
    let w = weights.matrix(Kind::Int8, rows, cols);
    let x = crate::testing::numbers(1.0, 2 * cols, 3);
    let mut packed = Packed::default();
    packed.pack(2, cols, |i| &x[i * cols..]);
    let want = product(Isa::Plain, &w, &packed, &[]);
    let mut y = vec![f32::NAN; 4 * rows];
    let out = Output::new(&mut y, 4, rows).at(&[3, 1]);
    // SAFETY: the plain form is available and `y` covers all places.
    unsafe { matmul(Isa::Plain, &w, 0..rows, &packed, out) };
    let bits: Vec<u32> = y.iter().map(|v| v.to_bits()).collect();
    assert_eq!((&bits[15..], &bits[5..10]), (&want[..rows], &want[rows..]));
    assert!(y[..5].iter().chain(&y[10..15]).all(|v| v.is_nan()));
}

/// The sum is the one that the document defines, written out a second time and element by element.
#[test]
fn the_order_is_the_documented_one() {
    let (rows, cols) = (3, 75);
    let weights = Weights::new(Kind::F32, rows, cols, 7);
    let w = weights.matrix(Kind::F32, rows, cols);
    let mut next = noise(9);
    let x: Vec<f32> = (0..cols).map(|_| number(next())).collect();
    let mut packed = Packed::default();
    packed.pack(1, cols, |_| &x);
    let got = product(Isa::detect(), &w, &packed, &[]);
    for (r, got) in got.iter().enumerate() {
        let mut lanes = [0.0f32; 16];
        for c in 0..96 {
            let (weight, value) = x.get(c).map_or((0.0, 0.0), |x| (w.at(r, c), *x));
            let lane = c % 32 / 2;
            lanes[lane] = weight.mul_add(value, lanes[lane]);
        }
        let eight: Vec<f32> = (0..8).map(|l| lanes[l] + lanes[l + 8]).collect();
        let four: Vec<f32> = (0..4).map(|l| eight[l] + eight[l + 4]).collect();
        let sum = (four[0] + four[2]) + (four[1] + four[3]);
        assert_eq!(*got, sum.to_bits());
    }
}

/// Close to the exact value: the order loses no more than f32 must.
#[test]
fn the_sum_is_accurate() {
    let (rows, cols) = (16, 3584);
    let weights = Weights::new(Kind::Mxfp4, rows, cols, 3);
    let w = weights.matrix(Kind::Mxfp4, rows, cols);
    let mut next = noise(4);
    let x: Vec<f32> = (0..cols).map(|_| number(next())).collect();
    let mut packed = Packed::default();
    packed.pack(1, cols, |_| &x);
    let got = product(Isa::detect(), &w, &packed, &[]);
    for (r, bits) in got.iter().enumerate() {
        let terms: Vec<f64> = x
            .iter()
            .enumerate()
            .map(|(c, &x)| w.at(r, c) as f64 * x as f64)
            .collect();
        let (exact, size): (f64, f64) = (terms.iter().sum(), terms.iter().map(|t| t.abs()).sum());
        assert!((f32::from_bits(*bits) as f64 - exact).abs() <= 1e-6 * size, "row {r}");
    }
}

use super::*;
use crate::Isa;
use crate::aligned::Aligned;
use crate::format::f32_to_bf16;
use crate::latents::{KvFormat, Latents};
use crate::testing::numbers;
use crate::vector::dot_body;

fn attend(isa: Isa, cache: &Latents, positions: usize, query: &[f32], scale: f32, value: usize) -> Vec<f32> {
    let width = query.len();
    // So many heads that a full group and tiles of all sizes are met; all have the same query and must agree.
    const ALL: usize = GROUP + 11;
    let mut room = Aligned::default();
    let queries = query.repeat(ALL);
    let mut softmax = vec![Softmax::new(); ALL];
    let mut out = vec![0.0; ALL * value];
    for block in cache.blocks(positions) {
        // SAFETY: the form is available.
        unsafe {
            let rows = block.as_f32(isa, &mut room);
            attend_block(isa, &mut softmax, &queries, width, rows, &[], scale, &mut out)
        };
    }
    for (softmax, out) in softmax.iter().zip(out.chunks_exact_mut(value)) {
        // SAFETY: the form is available.
        unsafe { finish(isa, softmax, out) };
    }
    assert!(out.chunks_exact(value).all(|head| head == &out[..value]));
    out.truncate(value);
    out
}

/// Rows as a cache of this format holds them.
fn stored(format: KvFormat, rows: &[f32]) -> Vec<f32> {
    match format {
        KvFormat::F32 => rows.to_vec(),
        KvFormat::Bf16 => rows.iter().map(|x| bf16_to_f32(f32_to_bf16(*x))).collect(),
    }
}

fn filled(format: KvFormat, rows: &[f32], width: usize) -> Latents {
    let mut cache = Latents::new(width, format);
    rows.chunks_exact(width)
        .for_each(|row| cache.push(|new| new.copy_from_slice(row)));
    cache
}

#[test]
fn blocks_give_the_softmax_and_do_not_depend_on_later_positions() {
    let (width, value, scale) = (45, 37, 0.3);
    let given = numbers(2.0, 300 * width, 1);
    let query = numbers(2.0, width, 2);
    for format in KvFormat::ALL {
        let rows = stored(format, &given);
        for t in [0, 1, 126, 127, 128, 129, 255, 256, 299] {
            let cache = filled(format, &given[..(t + 1) * width], width);
            let scores: Vec<f64> = (0..=t)
                .map(|s| {
                    (0..width)
                        .map(|i| rows[s * width + i] as f64 * query[i] as f64)
                        .sum::<f64>()
                        * scale as f64
                })
                .collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let got = attend(Isa::Plain, &cache, t + 1, &query, scale, value);
            for j in 0..value {
                let exact: f64 = (0..=t)
                    .map(|s| (scores[s] - max).exp() / sum * rows[s * width + j] as f64)
                    .sum();
                assert!(
                    (got[j] as f64 - exact).abs() < 2e-6,
                    "{format}, position {t}: {} for {exact}",
                    got[j]
                );
            }
            let longer = filled(format, &given, width);
            for isa in Isa::available() {
                assert_eq!(attend(isa, &cache, t + 1, &query, scale, value), got, "{isa}");
                assert_eq!(attend(isa, &longer, t + 1, &query, scale, value), got, "{isa}");
            }
        }
    }
}

/// The definition, written out for one head.
fn defined(rows: &[f32], query: &[f32], scale: f32, value: usize) -> Vec<f32> {
    let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0, vec![0.0; value]);
    for block in rows.chunks(ATTENTION_BLOCK * query.len()) {
        let rows = || block.chunks_exact(query.len());
        let scores: Vec<f32> = rows().map(|row| dot_body(query, row) * scale).collect();
        let before = max;
        max = scores.iter().fold(max, |a, b| if *b > a { *b } else { a });
        let keep = exp(before - max);
        sum *= keep;
        out.iter_mut().for_each(|o| *o *= keep);
        for (score, row) in scores.iter().zip(rows()) {
            let p = exp(score - max);
            sum += p;
            out.iter_mut().zip(row).for_each(|(o, x)| *o = p.mul_add(*x, *o));
        }
    }
    out.iter().map(|o| o / sum).collect()
}

/// Any number of heads, each with its own query, gives the definition's bits, in every form.
#[test]
fn heads_together_are_the_definition() {
    let shapes = [
        (1, 1, 1, 1),
        (2, 16, 16, 5),
        (5, 50, 33, 131),
        (9, 96, 80, 258),
        (14, 83, 83, 128),
        (31, 144, 130, 135),
    ];
    for (seed, (heads, width, value, positions)) in (0..).zip(shapes) {
        let rows = numbers(1.5, positions * width, seed);
        let queries = numbers(1.5, heads * width, seed + 100);
        let cache = filled(KvFormat::F32, &rows, width);
        for isa in Isa::available() {
            let (mut softmax, mut out) = (vec![Softmax::new(); heads], vec![0.0; heads * value]);
            for block in cache.blocks(positions) {
                // SAFETY: the form is available.
                unsafe {
                    let mut room = Aligned::default();
                    let rows = block.as_f32(isa, &mut room);
                    attend_block(isa, &mut softmax, &queries, width, rows, &[0; 1000], 0.2, &mut out)
                };
            }
            let heads = softmax.iter().zip(queries.chunks_exact(width));
            for ((softmax, query), out) in heads.zip(out.chunks_exact_mut(value)) {
                // SAFETY: the form is available.
                unsafe { finish(isa, softmax, out) };
                let want = defined(&rows, query, 0.2, value);
                let same = out.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{isa}, {width} numbers, {positions} positions");
            }
        }
    }
}

/// A bf16 cache gives the bits of an f32 cache that was given the rounded numbers.
#[test]
fn after_rounding_bf16_is_f32() {
    let (width, value) = (83, 83);
    let given = numbers(3.0, 150 * width, 5);
    let query = numbers(2.0, width, 6);
    let short = filled(KvFormat::Bf16, &given, width);
    let long = filled(KvFormat::F32, &stored(KvFormat::Bf16, &given), width);
    for isa in Isa::available() {
        let [a, b] = [&short, &long].map(|cache| attend(isa, cache, 150, &query, 0.2, value));
        assert_eq!(a, b, "{isa}");
    }
}

#[test]
fn transposed_product() {
    let (n, k) = (19, 50);
    let w: Vec<u8> = numbers(2.0, n * k, 3)
        .iter()
        .flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes())
        .collect();
    let x = numbers(2.0, n, 4);
    let at = |i: usize, j: usize| bf16_to_f32(u16::from_le_bytes([w[2 * (i * k + j)], w[2 * (i * k + j) + 1]])) as f64;
    let mut first: Option<Vec<f32>> = None;
    for isa in Isa::available() {
        let mut out = vec![0.0; k];
        // SAFETY: the form is available.
        unsafe { transposed(isa, &w, &x, &mut out) };
        for (j, o) in out.iter().enumerate() {
            let exact: f64 = (0..n).map(|i| at(i, j) * x[i] as f64).sum();
            assert!((*o as f64 - exact).abs() < 1e-4);
        }
        assert_eq!(first.get_or_insert(out.clone()), &out);
    }
}

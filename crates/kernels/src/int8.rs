//! From bf16 to int8 with a row scale: the only conversion of weights there is, defined in `docs/numerics.md`, section 2.

use crate::format::bf16_to_f32;

/// The largest integer of a row; the smallest is its negative, so that -128 never occurs.
pub const INT8_MOST: i32 = 127;
/// 1.5 * 2^23: a small number added to it is rounded to an integer, ties to even, which then stands in the lower bits.
const ROUND: f32 = 12_582_912.0;
/// The bf16 magnitude of infinity; NaN lies above.
const INFINITE: u16 = 0x7f80;

/// A weight that no integer stands for: infinite or not a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("column {column} holds no finite number")]
pub struct NotFinite {
    /// Its column.
    pub column: usize,
}

/// Converts one row of little-endian bf16, two bytes for each of `integers`, and returns its scale:
/// `scale = max|w| / 127`, `integer = w / scale` to the nearest, ties to even; all 0 where the row is.
///
/// Each step is one IEEE operation, so the bits are the same on every machine.
///
/// # Errors
///
/// [`NotFinite`] for the first weight that is no finite number; `integers` then hold nothing of use.
///
/// # Panics
///
/// When `row` is not twice as long as `integers`.
pub fn quantize_row(row: &[u8], integers: &mut [u8]) -> Result<f32, NotFinite> {
    assert_eq!(row.len(), 2 * integers.len(), "two bytes a weight");
    let (row, _) = row.as_chunks::<2>();
    let magnitude = |bytes: &[u8; 2]| u16::from_le_bytes(*bytes) & 0x7fff;
    // Magnitudes of bf16 have the order of their bits.
    let largest = row.iter().fold(0, |largest: u16, w| largest.max(magnitude(w)));
    if largest >= INFINITE {
        let column = row.iter().position(|w| magnitude(w) >= INFINITE).unwrap_or(0);
        return Err(NotFinite { column });
    }
    let scale = bf16_to_f32(largest) / INT8_MOST as f32;
    if largest == 0 {
        integers.fill(0);
        return Ok(scale);
    }
    for (integer, w) in integers.iter_mut().zip(row) {
        // At most 127.13 even where the scale is subnormal and has lost bits: no clamp is needed.
        let rounded = bf16_to_f32(u16::from_le_bytes(*w)) / scale + ROUND;
        *integer = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as u8;
    }
    Ok(scale)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::f32_to_bf16;
    use proptest::prelude::*;

    fn bytes(bits: &[u16]) -> Vec<u8> {
        bits.iter().flat_map(|bits| bits.to_le_bytes()).collect()
    }

    fn quantized(bits: &[u16]) -> Result<(f32, Vec<i8>), NotFinite> {
        let mut integers = vec![1; bits.len()];
        let scale = quantize_row(&bytes(bits), &mut integers)?;
        Ok((scale, integers.into_iter().map(|i| i as i8).collect()))
    }

    /// The definition, word for word.
    fn plainly(bits: &[u16]) -> (f32, Vec<i8>) {
        let row: Vec<f32> = bits.iter().map(|&bits| bf16_to_f32(bits)).collect();
        let largest = row.iter().fold(0.0, |largest: f32, w| largest.max(w.abs()));
        let scale = largest / 127.0;
        let integer = |w: &f32| match scale == 0.0 {
            true => 0,
            false => {
                let i = (w / scale).round_ties_even();
                assert!(i.abs() <= 127.0, "{w:e} / {scale:e}");
                i as i8
            }
        };
        (scale, row.iter().map(integer).collect())
    }

    proptest! {
        #[test]
        fn every_row_is_as_defined(bits in prop::collection::vec(any::<u16>(), 0..200), top in 0u16..=0x7f7f) {
            // Rows of one magnitude and below, subnormal ones among them.
            let bits: Vec<u16> = bits.iter().map(|b| (b & 0x7fff).min(top) | b & 0x8000).collect();
            let (scale, integers) = quantized(&bits).unwrap();
            let want = plainly(&bits);
            prop_assert_eq!(scale.to_bits(), want.0.to_bits());
            prop_assert_eq!(&integers, &want.1);
            // What the integers stand for is off by half a step, and what the divisions round.
            for (&bits, &integer) in bits.iter().zip(&integers) {
                let off = (bf16_to_f32(bits) as f64 - integer as f64 * scale as f64).abs();
                prop_assert!(off <= 0.5001 * scale as f64 + 127.0 * f32::from_bits(1) as f64, "{off:e}, {scale:e}");
            }
        }
    }

    #[test]
    fn the_largest_weight_is_127_whatever_its_size() {
        for bits in 1..INFINITE {
            let (_, integers) = quantized(&[bits, bits | 0x8000, 0]).unwrap();
            assert_eq!(integers, [127, -127, 0], "{bits:04x}");
        }
    }

    #[test]
    fn ties_go_to_the_even_integer() {
        // A scale of exactly 1.
        let row = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5, 62.5, 0.499, -0.0];
        let bits: Vec<u16> = row.iter().map(|&w| f32_to_bf16(w)).collect();
        let (scale, integers) = quantized(&bits).unwrap();
        assert_eq!(scale, 1.0);
        assert_eq!(integers, [127, 0, 2, 2, 0, -2, -2, 64, 62, 0, 0]);
    }

    #[test]
    fn a_row_of_zeros_is_zero() {
        assert_eq!(quantized(&[0, 0x8000, 0]), Ok((0.0, vec![0, 0, 0])));
        assert_eq!(quantized(&[]), Ok((0.0, vec![])));
    }

    #[test]
    fn what_is_not_finite_is_refused_by_its_column() {
        for bad in [0x7f80, 0xff80, 0x7f81, 0xffff] {
            assert_eq!(quantized(&[1, 2, bad, bad]), Err(NotFinite { column: 2 }), "{bad:04x}");
        }
        assert!(quantized(&[0x7f7f, 0xff7f]).is_ok(), "the largest finite ones");
    }
}

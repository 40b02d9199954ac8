use std::fmt;

/// Columns that share one MXFP4 scale byte, and the unit in which every weight row is summed.
pub const BLOCK: usize = 32;

/// The sixteen values of an E2M1 nibble (OCP Microscaling Formats, v1.0).
pub const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The E8M0 byte that means "not a number". An expert that holds one is refused when it is used.
pub const SCALE_NAN: u8 = 255;

/// 2^(byte - 127). Byte 0 is the subnormal 2^-127. Byte 255 has no value and must have been refused before.
#[inline(always)]
pub fn e8m0(byte: u8) -> f32 {
    f32::from_bits(if byte == 0 { 0x0040_0000 } else { (byte as u32) << 23 })
}

/// All 256 values of [`e8m0`]; the vector forms broadcast from here.
#[cfg(target_arch = "x86_64")]
pub(crate) static E8M0: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = f32::from_bits(if byte == 0 { 0x0040_0000 } else { (byte as u32) << 23 });
        byte += 1;
    }
    table
};

/// A bf16 number: the upper half of an f32, so the conversion is exact.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The bf16 number nearest to `x`, ties to even: what lies beyond bf16 becomes infinite, NaN stays NaN.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    match x.is_nan() {
        // Quiet, so that dropping the lower half cannot leave an infinity.
        true => (bits >> 16) as u16 | 0x40,
        false => ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16,
    }
}

/// How the elements of a weight matrix are stored. All are row-major as published; bytes need no alignment.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// Little-endian bf16, `rows * cols * 2` bytes.
    Bf16(&'a [u8]),
    /// Little-endian f32, `rows * cols * 4` bytes.
    F32(&'a [u8]),
    /// Signed bytes (`rows * cols`) and one little-endian f32 scale a row (`rows * 4` bytes), which multiplies the row's sum.
    Int8 {
        /// The integers.
        data: &'a [u8],
        /// The scales.
        scale: &'a [u8],
    },
    /// MXFP4: two E2M1 nibbles a byte, even column low (`rows * cols / 2` bytes), and one E8M0 scale byte for each 32
    /// columns of a row (`rows * cols / 32` bytes). `cols` is a multiple of 32.
    Mxfp4 {
        /// The nibbles.
        packed: &'a [u8],
        /// The scale bytes.
        scale: &'a [u8],
    },
}

/// A weight matrix `[rows, cols]` (outputs, inputs) over borrowed bytes.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    rows: usize,
    cols: usize,
    elements: Elements<'a>,
}

/// The bytes given for a matrix do not fit its shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} of a [{rows}, {cols}] matrix holds {found} bytes, expected {expected}")]
pub struct ShapeError {
    what: &'static str,
    rows: usize,
    cols: usize,
    found: usize,
    expected: usize,
}

impl<'a> Matrix<'a> {
    /// Checks the byte lengths once, so that the kernels may rely on them.
    pub fn new(rows: usize, cols: usize, elements: Elements<'a>) -> Result<Self, ShapeError> {
        let check = |what, found: usize, expected: usize| {
            if found == expected {
                Ok(())
            } else {
                Err(ShapeError {
                    what,
                    rows,
                    cols,
                    found,
                    expected,
                })
            }
        };
        match elements {
            Elements::Bf16(b) => check("the bf16 data", b.len(), rows * cols * 2)?,
            Elements::F32(b) => check("the f32 data", b.len(), rows * cols * 4)?,
            Elements::Int8 { data, scale } => {
                check("the int8 data", data.len(), rows * cols)?;
                check("the row scales", scale.len(), rows * 4)?;
            }
            Elements::Mxfp4 { packed, scale } => {
                check("the block remainder", cols % BLOCK, 0)?;
                check("the packed data", packed.len(), rows * cols / 2)?;
                check("the scale data", scale.len(), rows * cols / BLOCK)?;
            }
        }
        Ok(Self { rows, cols, elements })
    }

    /// The outputs `rows` as a matrix of their own.
    pub(crate) fn slice(&self, rows: std::ops::Range<usize>) -> Self {
        let part = |data: &'a [u8], row: usize| &data[rows.start * row..rows.end * row];
        let cols = self.cols;
        let elements = match self.elements {
            Elements::Bf16(data) => Elements::Bf16(part(data, 2 * cols)),
            Elements::F32(data) => Elements::F32(part(data, 4 * cols)),
            Elements::Int8 { data, scale } => Elements::Int8 {
                data: part(data, cols),
                scale: part(scale, 4),
            },
            Elements::Mxfp4 { packed, scale } => Elements::Mxfp4 {
                packed: part(packed, cols / 2),
                scale: part(scale, cols / BLOCK),
            },
        };
        Self {
            rows: rows.len(),
            cols,
            elements,
        }
    }

    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The stored elements.
    pub fn elements(&self) -> Elements<'a> {
        self.elements
    }

    /// The exact value of one element: the definition that every kernel must agree with. For int8 the integer, before
    /// [`Matrix::row_scale`].
    #[inline(always)]
    pub fn at(&self, row: usize, col: usize) -> f32 {
        let i = row * self.cols + col;
        match self.elements {
            Elements::Bf16(b) => bf16_to_f32(u16::from_le_bytes([b[2 * i], b[2 * i + 1]])),
            Elements::F32(b) => f32::from_le_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]]),
            Elements::Int8 { data, .. } => data[i] as i8 as f32,
            Elements::Mxfp4 { packed, scale } => {
                let byte = packed[i / 2];
                let nibble = if col.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
                E2M1[nibble as usize] * e8m0(scale[i / BLOCK])
            }
        }
    }

    /// What the sum of a row is multiplied by, where the format has such a factor.
    pub fn row_scale(&self, row: usize) -> Option<f32> {
        match self.elements {
            Elements::Int8 { scale, .. } => Some(f32::from_le_bytes(scale.as_chunks().0[row])),
            _ => None,
        }
    }

    /// Where the first scale byte 255 lies, as (row, block), if there is one.
    pub fn find_nan_scale(&self) -> Option<(usize, usize)> {
        const CHUNK: usize = 256;
        let Elements::Mxfp4 { scale, .. } = self.elements else {
            return None;
        };
        // The maximum of a chunk vectorises; a search byte by byte does not.
        let chunk = scale
            .chunks(CHUNK)
            .position(|c| c.iter().fold(0, |m: u8, &b| m.max(b)) == SCALE_NAN)?;
        let at = chunk * CHUNK + scale[chunk * CHUNK..].iter().position(|&b| b == SCALE_NAN)?;
        let blocks = self.cols / BLOCK;
        Some((at / blocks, at % blocks))
    }
}

impl fmt::Display for Matrix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.elements {
            Elements::Bf16(_) => "bf16",
            Elements::F32(_) => "f32",
            Elements::Int8 { .. } => "int8",
            Elements::Mxfp4 { .. } => "mxfp4",
        };
        write!(f, "{kind} [{}, {}]", self.rows, self.cols)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_the_nearest_ties_to_even() {
        for (x, bits) in [
            (0.0, 0),
            (-0.0, 0x8000),
            (1.0, 0x3f80),
            (f32::INFINITY, 0x7f80),
            (f32::MAX, 0x7f80),
            (f32::MIN, 0xff80),
            (f32::from_bits(0x7f7f_7fff), 0x7f7f),
            (f32::from_bits(0x3f80_8000), 0x3f80), // a tie, to even
            (f32::from_bits(0x3f81_8000), 0x3f82),
            (f32::from_bits(0x3f80_8001), 0x3f81),
            (f32::from_bits(0x0000_8001), 0x0001), // subnormal
            (f32::from_bits(0x0000_8000), 0x0000),
        ] {
            assert_eq!(f32_to_bf16(x), bits, "{x:e}");
        }
        assert!(bf16_to_f32(f32_to_bf16(f32::from_bits(0x7f80_0001))).is_nan());
        assert!(bf16_to_f32(f32_to_bf16(f32::from_bits(0xffff_ffff))).is_nan());
        for bits in (0..=u16::MAX).filter(|bits| !bf16_to_f32(*bits).is_nan()) {
            assert_eq!(f32_to_bf16(bf16_to_f32(bits)), bits);
        }
    }

    #[test]
    fn mxfp4_worked_example() {
        let packed = [22, 185, 206, 35, 133, 171, 155, 162, 188, 136, 11, 161, 0, 0, 0, 0];
        let m = Matrix::new(
            1,
            32,
            Elements::Mxfp4 {
                packed: &packed,
                scale: &[121],
            },
        )
        .unwrap();
        let first: Vec<f32> = (0..12).map(|c| m.at(0, c)).collect();
        let want = [
            0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625, 0.046875, -0.0,
            -0.0234375, -0.015625,
        ];
        assert_eq!(first, want);
        assert!(first[9].is_sign_negative());
    }

    #[test]
    fn mxfp4_all_bytes_by_all_scales() {
        let value = |nibble: u8| {
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0_f64][(nibble & 7) as usize];
            if nibble & 8 != 0 { -magnitude } else { magnitude }
        };
        for scale in 0..=254u8 {
            let scales = [scale];
            for byte in 0..=255u8 {
                let packed = [byte; 16];
                let m = Matrix::new(
                    1,
                    32,
                    Elements::Mxfp4 {
                        packed: &packed,
                        scale: &scales,
                    },
                )
                .unwrap();
                for (col, nibble) in [(0, byte & 15), (1, byte >> 4)] {
                    // f64 holds every product exactly; the conversion overflows to infinity as IEEE says.
                    let exact = (value(nibble) * 2.0_f64.powi(scale as i32 - 127)) as f32;
                    assert_eq!(
                        m.at(0, col).to_bits(),
                        exact.to_bits(),
                        "byte {byte} scale {scale} column {col}"
                    );
                }
            }
        }
    }

    #[test]
    fn nan_scales_are_found_and_shapes_checked() {
        let packed = vec![0; 8 * 1024 / 2];
        let mut scale = vec![120; 8 * 1024 / 32];
        let find = |scale: &[u8]| {
            Matrix::new(8, 1024, Elements::Mxfp4 { packed: &packed, scale })
                .unwrap()
                .find_nan_scale()
        };
        assert_eq!(find(&scale), None);
        scale[7 * 32 + 31] = SCALE_NAN;
        assert_eq!(find(&scale), Some((7, 31)));
        scale[33] = SCALE_NAN;
        assert_eq!(find(&scale), Some((1, 1)));
        let e = Matrix::new(2, 32, Elements::Bf16(&[0; 100])).unwrap_err();
        assert_eq!(
            e.to_string(),
            "the bf16 data of a [2, 32] matrix holds 100 bytes, expected 128"
        );
        assert!(
            Matrix::new(
                1,
                48,
                Elements::Mxfp4 {
                    packed: &[0; 24],
                    scale: &[0]
                }
            )
            .is_err()
        );
    }
}

//! Numbers to little-endian bytes and back, piece by piece, so that state leaves and comes without a second copy of it.

use std::io::{self, Read, Write};

/// Bytes converted at one time.
const PIECE: usize = 16 << 10;

/// Writes `numbers`, each as `bytes` gives it.
pub(crate) fn write<T: Copy, const N: usize>(
    numbers: &[T],
    bytes: fn(T) -> [u8; N],
    to: &mut dyn Write,
) -> io::Result<()> {
    let mut piece = [0; PIECE];
    for numbers in numbers.chunks(PIECE / N) {
        let piece = &mut piece[..numbers.len() * N];
        for (place, x) in piece.as_chunks_mut::<N>().0.iter_mut().zip(numbers) {
            *place = bytes(*x);
        }
        to.write_all(piece)?;
    }
    Ok(())
}

/// Fills `numbers` with what [`write`] wrote.
pub(crate) fn read<T: Copy, const N: usize>(
    numbers: &mut [T],
    number: fn([u8; N]) -> T,
    from: &mut dyn Read,
) -> io::Result<()> {
    let mut piece = [0; PIECE];
    for numbers in numbers.chunks_mut(PIECE / N) {
        let piece = &mut piece[..numbers.len() * N];
        from.read_exact(piece)?;
        for (x, place) in numbers.iter_mut().zip(piece.as_chunks::<N>().0) {
            *x = number(*place);
        }
    }
    Ok(())
}

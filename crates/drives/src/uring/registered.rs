//! An arena registered with a ring: its pages are mapped once instead of for each read.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use io_uring::IoUring;

use crate::arena::Arena;

/// Most bytes of one registered buffer, a limit of the kernel.
const MAX_BUFFER_BYTES: usize = 1 << 30;

/// Most buffers that a ring takes, a limit of the kernel.
const MAX_BUFFERS: usize = 1 << 14;

/// Memory that a ring reads into without mapping it anew. The kernel has brought all of it into memory and keeps it there.
pub(super) struct Registered {
    /// Keeps the memory mapped as long as the ring knows it.
    arena: Arc<Arena>,
    piece_bytes: usize,
}

impl Registered {
    /// Registers all slots.
    pub(super) fn new(ring: &IoUring, arena: &Arc<Arena>) -> io::Result<Self> {
        let piece_bytes = piece_bytes(arena.slot_bytes(), MAX_BUFFER_BYTES);
        let pieces: Vec<libc::iovec> = pieces(arena.bytes(), piece_bytes)
            .map(|piece| libc::iovec {
                iov_base: arena.as_ptr().wrapping_add(piece.start).cast_mut().cast(),
                iov_len: piece.len(),
            })
            .collect();
        if pieces.len() > MAX_BUFFERS {
            return Err(io::Error::other(format!(
                "{} buffers of 1 GiB, at most {MAX_BUFFERS} are possible",
                pieces.len()
            )));
        }
        // SAFETY: the pieces lie inside the arena's mapping, which lives until the ring is closed, since this value keeps the
        // arena and the ring's owner drops it after the ring.
        unsafe { ring.submitter().register_buffers(&pieces) }?;
        Ok(Self {
            arena: Arc::clone(arena),
            piece_bytes,
        })
    }

    /// The registered buffer that holds `len` bytes at `address`; `None` when none holds them all.
    pub(super) fn buffer_of(&self, address: usize, len: usize) -> Option<u16> {
        let start = address.checked_sub(self.arena.as_ptr().addr())?;
        buffer_of(start..start.checked_add(len)?, self.arena.bytes(), self.piece_bytes)
    }
}

/// Bytes of a piece: whole slots where one fits, so that no read crosses a border.
fn piece_bytes(slot_bytes: usize, most: usize) -> usize {
    match most / slot_bytes {
        0 => most,
        slots => slots * slot_bytes,
    }
}

fn pieces(bytes: usize, piece_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    (0..bytes)
        .step_by(piece_bytes)
        .map(move |start| start..bytes.min(start + piece_bytes))
}

fn buffer_of(range: Range<usize>, bytes: usize, piece_bytes: usize) -> Option<u16> {
    if range.is_empty() || range.end > bytes {
        return None;
    }
    let piece = range.start / piece_bytes;
    let whole = piece == (range.end - 1) / piece_bytes;
    u16::try_from(piece).ok().filter(|_| whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_slots_that_fit_a_buffer() {
        assert_eq!(piece_bytes(3, 10), 9);
        assert_eq!(piece_bytes(10, 10), 10);
        assert_eq!(piece_bytes(11, 10), 10, "a slot larger than a buffer is cut");
        let cut: Vec<_> = pieces(21, 9).collect();
        assert_eq!(cut, [0..9, 9..18, 18..21]);
    }

    #[test]
    fn a_read_belongs_to_the_piece_that_holds_it_whole() {
        assert_eq!(buffer_of(0..9, 21, 9), Some(0));
        assert_eq!(buffer_of(9..10, 21, 9), Some(1));
        assert_eq!(buffer_of(18..21, 21, 9), Some(2));
        assert_eq!(buffer_of(8..10, 21, 9), None, "across a border");
        assert_eq!(buffer_of(18..22, 21, 9), None, "beyond the arena");
        assert_eq!(buffer_of(4..4, 21, 9), None);
        assert_eq!(buffer_of(usize::MAX - 1..usize::MAX, usize::MAX, 1), None);
    }
}

//! The cache of latent attention.

use crate::aligned::Aligned;
use crate::bytes;
use crate::format::{bf16_to_f32, f32_to_bf16};
use crate::isa::{Isa, multiversion};
use std::io::{self, Read, Write};
use std::sync::Arc;

/// Positions of one softmax block. Blocks are counted from position 0, so that a row's result does not depend on how the
/// positions arrived.
pub const ATTENTION_BLOCK: usize = 128;

/// How the numbers of a latent cache are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// f32, as computed.
    #[default]
    F32,
    /// bf16, rounded to nearest even when a position is added: half the memory, other bits.
    Bf16,
}

impl KvFormat {
    /// All formats.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            KvFormat::F32 => 4,
            KvFormat::Bf16 => 2,
        }
    }

    /// The name on command lines and in results.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::Bf16 => "bf16",
        }
    }
}

impl std::fmt::Display for KvFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The latents of one sequence and layer: a row of `width` numbers (normalised latent, then the shared key part) for each
/// position, in pages of [`ATTENTION_BLOCK`] positions. A page is taken when its first position comes, and growing never
/// moves what is there. Clones share pages until one of them adds to a page.
#[derive(Clone, Debug)]
pub struct Latents {
    width: usize,
    len: usize,
    pages: Pages,
}

/// Pages `[ATTENTION_BLOCK, width]`, row-major, each from a cache line on.
#[derive(Clone, Debug)]
enum Pages {
    F32(Vec<Arc<Aligned<f32>>>),
    Bf16 {
        pages: Vec<Arc<Aligned<u16>>>,
        /// The newest row before rounding, `[width]`.
        row: Vec<f32>,
    },
}

impl Latents {
    /// An empty cache of rows of `width` numbers.
    pub fn new(width: usize, format: KvFormat) -> Self {
        let pages = match format {
            KvFormat::F32 => Pages::F32(vec![]),
            KvFormat::Bf16 => Pages::Bf16 {
                pages: vec![],
                row: vec![0.0; width],
            },
        };
        Self { width, len: 0, pages }
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes taken by the pages of `positions` positions.
    pub fn bytes(width: usize, positions: usize, format: KvFormat) -> u64 {
        (positions.div_ceil(ATTENTION_BLOCK) * ATTENTION_BLOCK * width * format.bytes()) as u64
    }

    /// Adds one position, whose row `fill` sets.
    pub(crate) fn push(&mut self, fill: impl FnOnce(&mut [f32])) {
        let (width, at) = (self.width, self.len);
        self.len += 1;
        match &mut self.pages {
            Pages::F32(pages) => fill(new_row(pages, width, at)),
            Pages::Bf16 { pages, row } => {
                fill(row);
                let stored = new_row(pages, width, at);
                stored.iter_mut().zip(row).for_each(|(s, x)| *s = f32_to_bf16(*x));
            }
        }
    }

    /// The pages with the first `positions` positions, each a row-major `[positions of the page, width]` slice.
    pub(crate) fn blocks(&self, positions: usize) -> impl Iterator<Item = Block<'_>> {
        assert!(positions <= self.len, "{positions} positions of {}", self.len);
        (0..positions.div_ceil(ATTENTION_BLOCK)).map(move |i| {
            let len = (positions - i * ATTENTION_BLOCK).min(ATTENTION_BLOCK) * self.width;
            match &self.pages {
                Pages::F32(pages) => Block::F32(&pages[i][..len]),
                Pages::Bf16 { pages, .. } => Block::Bf16(&pages[i][..len]),
            }
        })
    }

    /// Writes the rows of all positions, `[positions, width]` little-endian numbers of the cache's format.
    pub(crate) fn save(&self, to: &mut dyn Write) -> io::Result<()> {
        self.blocks(self.len).try_for_each(|block| match block {
            Block::F32(rows) => bytes::write(rows, f32::to_le_bytes, to),
            Block::Bf16(rows) => bytes::write(rows, u16::to_le_bytes, to),
        })
    }

    /// Holds `positions` rows as [`save`](Self::save) wrote them, and nothing else. After an error the cache is of no use.
    pub(crate) fn load(&mut self, positions: usize, from: &mut dyn Read) -> io::Result<()> {
        let width = self.width;
        self.len = positions;
        match &mut self.pages {
            Pages::F32(pages) => load_pages(pages, positions, width, f32::from_le_bytes, from),
            Pages::Bf16 { pages, .. } => load_pages(pages, positions, width, u16::from_le_bytes, from),
        }
    }
}

/// The row of position `at`, on a new page where it is the first of one. A page that others hold too is copied first.
fn new_row<T: Copy + Default>(pages: &mut Vec<Arc<Aligned<T>>>, width: usize, at: usize) -> &mut [T] {
    let page = at / ATTENTION_BLOCK;
    if page == pages.len() {
        pages.push(Arc::new(Aligned::zeros(ATTENTION_BLOCK * width)));
    }
    &mut Arc::make_mut(&mut pages[page])[at % ATTENTION_BLOCK * width..][..width]
}

fn load_pages<T: Copy + Default, const N: usize>(
    pages: &mut Vec<Arc<Aligned<T>>>,
    positions: usize,
    width: usize,
    number: fn([u8; N]) -> T,
    from: &mut dyn Read,
) -> io::Result<()> {
    pages.clear();
    for first in (0..positions).step_by(ATTENTION_BLOCK) {
        new_row(pages, width, first);
        let rows = (positions - first).min(ATTENTION_BLOCK);
        if let Some(page) = pages.last_mut().and_then(Arc::get_mut) {
            bytes::read(&mut page[..rows * width], number, from)?;
        }
    }
    Ok(())
}

/// A page's rows, or the first of them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Block<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
}

impl<'a> Block<'a> {
    /// The memory of the rows.
    pub(crate) fn bytes(self) -> &'a [u8] {
        let (at, len) = match self {
            Block::F32(rows) => (rows.as_ptr().cast(), size_of_val(rows)),
            Block::Bf16(rows) => (rows.as_ptr().cast(), size_of_val(rows)),
        };
        // SAFETY: plain numbers, all of which are set, borrowed for as long.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    /// The rows as f32, in `room` where they are stored otherwise.
    ///
    /// # Safety
    /// The processor must run `isa`.
    pub(crate) unsafe fn as_f32(self, isa: Isa, room: &'a mut Aligned<f32>) -> &'a [f32] {
        match self {
            Block::F32(rows) => rows,
            Block::Bf16(rows) => {
                if room.len() < rows.len() {
                    *room = Aligned::zeros(rows.len());
                }
                let room = &mut room[..rows.len()];
                // SAFETY: the caller's promise.
                unsafe { expand(isa, rows, room) };
                room
            }
        }
    }
}

multiversion! {
    /// Each bf16 number as f32, exactly.
    unsafe fn expand(from: &[u16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = bf16_to_f32(*from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(format: KvFormat, width: usize, rows: std::ops::Range<usize>) -> Latents {
        let mut cache = Latents::new(width, format);
        rows.for_each(|t| cache.push(|row| row.fill(t as f32)));
        cache
    }

    fn saved(cache: &Latents) -> Vec<u8> {
        let mut bytes = vec![];
        cache.save(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn what_was_saved_is_loaded() {
        for format in KvFormat::ALL {
            for positions in [0, 1, ATTENTION_BLOCK, ATTENTION_BLOCK + 1] {
                let cache = filled(format, 5, 0..positions);
                let bytes = saved(&cache);
                assert_eq!(bytes.len(), positions * 5 * format.bytes());
                // What the other held before does not matter.
                let mut other = filled(format, 5, 0..300);
                other.load(positions, &mut &bytes[..]).unwrap();
                assert_eq!((other.len(), saved(&other)), (positions, bytes.clone()));
                let short = &bytes[..bytes.len().saturating_sub(1)];
                assert_eq!(other.load(positions, &mut &*short).is_err(), positions > 0);
            }
        }
    }

    #[test]
    fn clones_share_pages_and_part_when_one_grows() {
        for format in KvFormat::ALL {
            let mut cache = filled(format, 3, 0..200);
            let branch = cache.clone();
            let before = saved(&branch);
            cache.push(|row| row.fill(-1.0));
            assert_eq!(saved(&branch), before);
            assert_eq!(saved(&cache)[..before.len()], before);
            let first = |cache: &Latents| match &cache.pages {
                Pages::F32(pages) => pages[0].as_ptr() as usize,
                Pages::Bf16 { pages, .. } => pages[0].as_ptr() as usize,
            };
            assert_eq!(first(&cache), first(&branch));
        }
    }

    #[test]
    fn pages_never_move_and_take_what_is_said() {
        for format in KvFormat::ALL {
            let width = 7;
            let mut cache = Latents::new(width, format);
            let mut first = None;
            for t in 0..3 * ATTENTION_BLOCK {
                cache.push(|row| row.fill(t as f32));
                let (place, bytes) = match &cache.pages {
                    Pages::F32(pages) => (pages[0].as_ptr() as usize, pages.len() * pages[0].len() * 4),
                    Pages::Bf16 { pages, .. } => (pages[0].as_ptr() as usize, pages.len() * pages[0].len() * 2),
                };
                assert_eq!(place, *first.get_or_insert(place));
                assert_eq!(bytes as u64, Latents::bytes(width, t + 1, format));
            }
        }
    }
}

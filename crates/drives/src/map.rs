//! Anonymous memory for direct reads: aligned to huge pages, and backed by them where the system allows.

use std::fmt;

use memmap2::MmapMut;

use crate::error::{Error, Result};
use crate::page::HUGE_PAGE_BYTES;
use crate::platform;

/// Whether the memory of an arena or buffer asks for huge pages. They double to triple the speed of direct reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HugePages {
    /// The kernel accepted the advice; pages are huge where it finds free ones.
    Advised,
    /// The memory is smaller than one huge page.
    TooSmall,
    /// The system offers none, for this reason.
    Refused(String),
}

impl fmt::Display for HugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Advised => write!(f, "huge pages advised"),
            Self::TooSmall => write!(f, "too small for huge pages"),
            Self::Refused(reason) => write!(f, "no huge pages: {reason}"),
        }
    }
}

/// `len` bytes of zeroed memory that start at `start` in `map`, at a multiple of the huge page size where `len` reaches it.
pub(crate) struct AlignedMap {
    pub(crate) map: MmapMut,
    pub(crate) start: usize,
    pub(crate) huge: HugePages,
}

impl AlignedMap {
    /// Maps memory. Only the whole huge pages inside `len` are advised, so that no more than `len` bytes are ever resident.
    pub(crate) fn new(len: usize) -> Result<Self> {
        let failed = |reason: String| Error::Map { bytes: len, reason };
        let slack = if len < HUGE_PAGE_BYTES { 0 } else { HUGE_PAGE_BYTES };
        let total = len
            .checked_add(slack)
            .ok_or_else(|| failed("the size overflows".into()))?;
        let map = MmapMut::map_anon(total).map_err(|error| failed(error.to_string()))?;
        if slack == 0 {
            return Ok(Self {
                map,
                start: 0,
                huge: HugePages::TooSmall,
            });
        }
        let start = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
        let whole = len - len % HUGE_PAGE_BYTES;
        let huge = match platform::advise_huge(&map, start, whole) {
            Ok(()) => HugePages::Advised,
            Err(error) => HugePages::Refused(error.to_string()),
        };
        Ok(Self { map, start, huge })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_maps_start_on_a_huge_page() {
        let aligned = AlignedMap::new(5 << 20).unwrap();
        let address = aligned.map.as_ptr() as usize + aligned.start;
        assert_eq!(address % HUGE_PAGE_BYTES, 0);
        assert!(aligned.start + (5 << 20) <= aligned.map.len());
    }

    #[test]
    fn absurd_sizes_are_refused() {
        let error = AlignedMap::new(usize::MAX - 4096).err().unwrap();
        assert!(error.to_string().contains("lower the memory budget"));
        let error = AlignedMap::new(1 << 60).err().unwrap();
        assert!(matches!(error, Error::Map { .. }));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn no_huge_page_reaches_beyond_the_end() {
        use crate::page::{PAGE_BYTES, resident_pages};
        let len = 3 << 20;
        let mut aligned = AlignedMap::new(len).unwrap();
        aligned.map[aligned.start..][..len].fill(1);
        let (used, beyond) = aligned.map[aligned.start..].split_at(len);
        assert_eq!(resident_pages(used), len / PAGE_BYTES);
        assert_eq!(resident_pages(beyond), 0);
    }
}

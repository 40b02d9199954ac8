//! Page arithmetic. Direct reads move whole pages, so every offset, length and window is a multiple of [`PAGE_BYTES`].

/// Unit of direct reads in bytes: file offsets, lengths and memory addresses of a read are multiples of it.
///
/// 4096 satisfies every block device with 512 or 4096 byte sectors.
pub const PAGE_BYTES: usize = 4096;

/// Size of a transparent huge page on x86-64 and on Arm with 4 KiB pages. Read targets are aligned to it.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

const PAGE: u64 = PAGE_BYTES as u64;

/// The largest page border at or below `offset`.
pub(crate) fn page_floor(offset: u64) -> u64 {
    offset - offset % PAGE
}

/// The smallest page border at or above `offset`; `None` on overflow.
pub(crate) fn page_ceil(offset: u64) -> Option<u64> {
    Some(page_floor(offset.checked_add(PAGE - 1)?))
}

/// Position of `offset` inside its page.
pub(crate) fn in_page(offset: u64) -> u64 {
    offset % PAGE
}

/// How many pages of mapped memory, which begins on a page border, are resident. Reads no byte of it.
#[cfg(all(test, target_os = "linux"))]
pub(crate) fn resident_pages(memory: &[u8]) -> usize {
    let mut pages = vec![0u8; memory.len().div_ceil(PAGE_BYTES)];
    let start = memory.as_ptr().cast_mut().cast();
    // SAFETY: the range is mapped, since `memory` borrows it, and `pages` has one byte for each of its pages.
    let status = unsafe { libc::mincore(start, memory.len(), pages.as_mut_ptr()) };
    assert_eq!(status, 0);
    pages.iter().filter(|&&page| page & 1 == 1).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borders() {
        assert_eq!(page_floor(4095), 0);
        assert_eq!(page_floor(4096), 4096);
        assert_eq!(page_ceil(0), Some(0));
        assert_eq!(page_ceil(1), Some(4096));
        assert_eq!(page_ceil(u64::MAX), None);
        assert_eq!(in_page(8193), 1);
    }
}

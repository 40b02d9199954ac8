//! Numbers that begin at a cache line, so that a register's load never takes two lines.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line, and of the widest register.
pub(crate) const LINE: usize = 64;

/// A fixed number of numbers from a cache line on.
#[derive(Debug)]
pub(crate) struct Aligned<T> {
    /// A little longer than needed; never grows, because that would move it.
    data: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    /// `len` zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        let spare = LINE / size_of::<T>() - 1;
        let data = vec![T::default(); len + spare];
        let start = data.as_ptr().align_offset(LINE);
        assert!(start <= spare, "a number of a size that divides a cache line");
        Self { data, start, len }
    }
}

impl<T: Copy + Default> Default for Aligned<T> {
    fn default() -> Self {
        Self::zeros(0)
    }
}

impl<T: Copy + Default> Clone for Aligned<T> {
    fn clone(&self) -> Self {
        let mut new = Self::zeros(self.len);
        new.copy_from_slice(self);
        new
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.data[self.start..][..self.len]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_are_aligned_too_and_hold_the_same() {
        for len in [0, 1, 31, 1000, 100_003] {
            let mut numbers = Aligned::<u16>::zeros(len);
            numbers.iter_mut().enumerate().for_each(|(i, x)| *x = i as u16);
            let kept: Vec<_> = (0..5).map(|_| numbers.clone()).collect();
            for clone in &kept {
                assert_eq!((clone.len(), clone.as_ptr() as usize % LINE), (len, 0));
                assert_eq!(clone[..], numbers[..]);
            }
        }
    }
}

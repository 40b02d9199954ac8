//! Sets of drives, as bits.

use crate::layout::DriveId;

/// Most drives of one streamer: a set of drives is one word.
pub const MAX_DRIVES: usize = u64::BITS as usize;

/// A set of the layout's drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub(crate) struct DriveSet(u64);

impl DriveSet {
    pub(crate) fn insert(&mut self, drive: DriveId) {
        self.0 |= 1 << drive.index();
    }

    pub(crate) fn remove(&mut self, drive: DriveId) {
        self.0 &= !(1 << drive.index());
    }

    pub(crate) fn contains(self, drive: DriveId) -> bool {
        self.0 >> drive.index() & 1 == 1
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> u32 {
        self.0.count_ones()
    }

    pub(crate) fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) fn is_subset(self, of: Self) -> bool {
        self.without(of).is_empty()
    }

    /// The drives' places in the layout, ascending.
    pub(crate) fn places(self) -> impl Iterator<Item = usize> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let place = rest.trailing_zeros() as usize;
            rest &= rest.checked_sub(1)?;
            Some(place)
        })
    }
}

impl FromIterator<usize> for DriveSet {
    fn from_iter<I: IntoIterator<Item = usize>>(places: I) -> Self {
        Self(places.into_iter().fold(0, |bits, place| bits | 1 << place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_places() {
        let set: DriveSet = [0, 3, 63].into_iter().collect();
        assert_eq!(set.places().collect::<Vec<_>>(), [0, 3, 63]);
        assert_eq!(set.len(), 3);
        let part: DriveSet = [3].into_iter().collect();
        assert!(part.is_subset(set) && !set.is_subset(part));
        assert_eq!(set.without(part).places().collect::<Vec<_>>(), [0, 63]);
        assert_eq!(set.without(part).union(part), set);
        assert!(DriveSet::default().is_empty() && DriveSet::default().places().next().is_none());
    }
}

//! Where the routed experts lie: six tensors each, one extent where they are contiguous.

use crate::schema::ExpertPart;

/// A contiguous range of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Extent {
    /// Place of the shard in [`Checkpoint::shards`](crate::Checkpoint::shards).
    pub shard: usize,
    /// First byte in the file; in general not page-aligned.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Where one of an expert's six tensors lies inside the expert's extents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PartPlace {
    /// Place of the extent in [`ExpertPlace::extents`].
    pub extent: usize,
    /// First byte, counted from the start of that extent.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Where an expert lies: as few extents as its six tensors allow.
///
/// Tensors that touch in the file, in whatever order, share an extent. The release needs one extent an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertPlace {
    extents: [Extent; ExpertPart::COUNT],
    used: usize,
    parts: [PartPlace; ExpertPart::COUNT],
}

impl ExpertPlace {
    /// The ranges to read, ordered by shard and offset.
    pub fn extents(&self) -> &[Extent] {
        &self.extents[..self.used]
    }

    /// Where one of the six tensors lies in them.
    pub fn part(&self, part: ExpertPart) -> PartPlace {
        self.parts[part as usize]
    }

    /// Bytes of the expert.
    pub fn bytes(&self) -> u64 {
        self.extents().iter().map(|extent| extent.len).sum()
    }
}

/// The shard number of a part that has not been found.
const NO_SHARD: u16 = u16::MAX;

/// File positions of the six parts of every expert: 60 bytes an expert, 5 MB for K3.
#[derive(Debug, Default)]
pub(crate) struct ExpertTable {
    part_bytes: [u64; ExpertPart::COUNT],
    offsets: Vec<[u64; ExpertPart::COUNT]>,
    shards: Vec<[u16; ExpertPart::COUNT]>,
}

impl ExpertTable {
    /// A table without any part found.
    pub(crate) fn new(experts: usize, part_bytes: [u64; ExpertPart::COUNT]) -> ExpertTable {
        ExpertTable {
            part_bytes,
            offsets: vec![[0; ExpertPart::COUNT]; experts],
            shards: vec![[NO_SHARD; ExpertPart::COUNT]; experts],
        }
    }

    /// Number of experts.
    pub(crate) fn len(&self) -> usize {
        self.offsets.len()
    }

    /// The shard that holds a part, once it is known.
    pub(crate) fn shard(&self, expert: usize, part: ExpertPart) -> Option<u16> {
        Some(self.shards[expert][part as usize]).filter(|&shard| shard != NO_SHARD)
    }

    /// Records where a part is.
    pub(crate) fn set(&mut self, expert: usize, part: ExpertPart, shard: u16, offset: u64) {
        self.shards[expert][part as usize] = shard;
        self.offsets[expert][part as usize] = offset;
    }

    /// The place of an expert, or `None` unless all six parts are known.
    pub(crate) fn place(&self, expert: usize) -> Option<ExpertPlace> {
        let (offsets, shards) = (self.offsets.get(expert)?, self.shards.get(expert)?);
        if shards.contains(&NO_SHARD) {
            return None;
        }
        let mut order = [0, 1, 2, 3, 4, 5];
        order.sort_unstable_by_key(|&part: &usize| (shards[part], offsets[part]));
        let mut place = ExpertPlace {
            extents: Default::default(),
            used: 0,
            parts: Default::default(),
        };
        for part in order {
            let (shard, offset, len) = (usize::from(shards[part]), offsets[part], self.part_bytes[part]);
            let touches = place.used.checked_sub(1).filter(|&last| {
                let last = place.extents[last];
                last.shard == shard && last.offset + last.len == offset
            });
            let extent = touches.unwrap_or_else(|| {
                place.extents[place.used] = Extent { shard, offset, len: 0 };
                place.used += 1;
                place.used - 1
            });
            place.parts[part] = PartPlace {
                extent,
                offset: offset - place.extents[extent].offset,
                len,
            };
            place.extents[extent].len += len;
        }
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: [u64; 6] = [48, 3, 48, 4, 48, 3];

    fn table(places: [(u16, u64); 6]) -> ExpertTable {
        let mut table = ExpertTable::new(1, BYTES);
        for (part, (shard, offset)) in ExpertPart::ALL.into_iter().zip(places) {
            assert_eq!(table.place(0), None);
            table.set(0, part, shard, offset);
        }
        table
    }

    #[test]
    fn contiguous_parts_are_one_extent_in_any_order() {
        let published = table([(2, 100), (2, 148), (2, 151), (2, 199), (2, 203), (2, 251)])
            .place(0)
            .unwrap();
        assert_eq!(
            published.extents(),
            [Extent {
                shard: 2,
                offset: 100,
                len: 154
            }]
        );
        let part = published.part(ExpertPart::W2Scale);
        assert_eq!(
            part,
            PartPlace {
                extent: 0,
                offset: 99,
                len: 4
            }
        );

        let scales_first = table([(2, 110), (2, 100), (2, 158), (2, 103), (2, 206), (2, 107)])
            .place(0)
            .unwrap();
        assert_eq!(
            scales_first.extents(),
            [Extent {
                shard: 2,
                offset: 100,
                len: 154
            }]
        );
        assert_eq!(
            scales_first.part(ExpertPart::W3Packed),
            PartPlace {
                extent: 0,
                offset: 106,
                len: 48
            }
        );
    }

    #[test]
    fn scattered_parts_take_the_fewest_extents() {
        let place = table([(1, 100), (1, 148), (0, 0), (0, 48), (1, 152), (1, 200)])
            .place(0)
            .unwrap();
        let extents = [
            Extent {
                shard: 0,
                offset: 0,
                len: 52,
            },
            Extent {
                shard: 1,
                offset: 100,
                len: 51,
            },
            Extent {
                shard: 1,
                offset: 152,
                len: 51,
            },
        ];
        assert_eq!(place.extents(), extents);
        assert_eq!(
            place.part(ExpertPart::W1Scale),
            PartPlace {
                extent: 1,
                offset: 48,
                len: 3
            }
        );
        assert_eq!(
            place.part(ExpertPart::W3Packed),
            PartPlace {
                extent: 2,
                offset: 0,
                len: 48
            }
        );
        assert_eq!(place.bytes(), 154);
    }
}

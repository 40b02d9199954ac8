//! The experts of a pass, from the drives to the model.

use crate::error::Error;
use crate::generate::Cancel;
use crate::placement::Checksums;
use checkpoint::{Checkpoint, ExpertPart, TEXT_PREFIX, expert_tensor_name};
use drives::{Barrier, ExpertId, Landed, Streamer};
use kernels::{Elements, ExpertMatrices, Matrix};
use models::{EXPERTS_TOGETHER, ExpertStream, RunExperts};

/// Of the slots for experts in flight, one in so many may be held back for experts that are computed together.
const HELD_SHARE: usize = 4;

/// Checksums that experts are compared with, and the sum of bytes compared.
pub(crate) struct Checks<'a> {
    pub(crate) checksums: &'a Checksums,
    pub(crate) bytes: &'a mut u64,
}

/// Streams the experts of one pass and counts what it needed.
pub(crate) struct PassExperts<'a> {
    checkpoint: &'a Checkpoint,
    streamer: &'a mut Streamer,
    cancel: &'a Cancel,
    needed_bytes: &'a mut u64,
    checks: Option<Checks<'a>>,
    barrier: Option<Barrier>,
    /// Most experts that are computed at once while their slots wait to be read into.
    together: usize,
}

impl<'a> PassExperts<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        streamer: &'a mut Streamer,
        cancel: &'a Cancel,
        needed_bytes: &'a mut u64,
        checks: Option<Checks<'a>>,
        slots: usize,
    ) -> Self {
        Self {
            checkpoint,
            streamer,
            cancel,
            needed_bytes,
            checks,
            barrier: None,
            together: (slots / HELD_SHARE).max(1),
        }
    }

    /// Compares an expert as it landed with its checksums. Its extents as they should be where bytes were wrong and could be mended.
    fn mend(&mut self, landed: &Landed) -> Result<Option<Vec<Vec<u8>>>, Error> {
        match &mut self.checks {
            // What stayed in memory was found right when it landed.
            _ if landed.cached => Ok(None),
            Some(Checks { checksums, bytes }) => Ok(checksums.check(landed.expert, &landed.lease, bytes)?),
            None => Ok(None),
        }
    }

    /// The matrices of an expert, where it landed or where it was mended.
    fn matrices<'b>(&self, landed: &'b Landed, mended: Option<&'b [Vec<u8>]>) -> Result<ExpertMatrices<'b>, Error> {
        let c = self.checkpoint.config();
        let (layer, expert) = (landed.expert.layer as usize, landed.expert.expert as usize);
        let place = self.checkpoint.expert(layer, expert)?;
        let part = |part: ExpertPart| {
            let at = place.part(part);
            let extent: &[u8] = mended.map_or(landed.lease.extent(at.extent), |extents| &extents[at.extent]);
            &extent[at.offset as usize..][..at.len as usize]
        };
        let matrix = |rows, cols, packed, scale| -> Result<Matrix<'b>, Error> {
            let elements = Elements::Mxfp4 {
                packed: part(packed),
                scale: part(scale),
            };
            let m = Matrix::new(rows, cols, elements)?;
            match (!landed.cached).then(|| m.find_nan_scale()).flatten() {
                None => Ok(m),
                Some((row, block)) => Err(Error::ScaleNan {
                    path: self.checkpoint.shards()[place.extents()[place.part(scale).extent].shard]
                        .path
                        .clone(),
                    tensor: format!("{TEXT_PREFIX}{}", expert_tensor_name(layer, expert, scale)),
                    row,
                    block,
                }),
            }
        };
        let (inner, latent) = (c.moe_intermediate_size, c.routed_expert_hidden_size);
        Ok(ExpertMatrices {
            gate: matrix(inner, latent, ExpertPart::W1Packed, ExpertPart::W1Scale)?,
            up: matrix(inner, latent, ExpertPart::W3Packed, ExpertPart::W3Scale)?,
            down: matrix(latent, inner, ExpertPart::W2Packed, ExpertPart::W2Scale)?,
        })
    }

    /// Gives experts to the model. Of those whose bytes were wrong nothing is kept.
    fn run(&mut self, landed: &[Landed], run: &mut RunExperts) -> Result<(), Error> {
        let mut mended = Vec::with_capacity(landed.len());
        for landed in landed {
            let of_one = self.mend(landed);
            if !matches!(of_one, Ok(None)) {
                self.streamer.forget(landed.expert);
            }
            mended.push(of_one?);
        }
        let mut experts = Vec::with_capacity(landed.len());
        for (landed, mended) in landed.iter().zip(&mended) {
            match self.matrices(landed, mended.as_deref()) {
                Ok(matrices) => experts.push((landed.expert.expert, matrices)),
                Err(error) => {
                    self.streamer.forget(landed.expert);
                    return Err(error);
                }
            }
        }
        run(&experts);
        Ok(())
    }
}

impl ExpertStream for PassExperts<'_> {
    type Error = Error;

    fn demand(&mut self, layer: usize, experts: &[u32]) -> Result<(), Error> {
        self.cancel.check()?;
        let ids: Vec<ExpertId> = experts
            .iter()
            .map(|&expert| ExpertId {
                layer: layer as u32,
                expert,
            })
            .collect();
        for id in &ids {
            *self.needed_bytes += self.checkpoint.expert(layer, id.expert as usize)?.bytes();
        }
        self.barrier = Some(self.streamer.demand(&ids)?);
        Ok(())
    }

    fn next(&mut self, run: &mut RunExperts) -> Result<bool, Error> {
        self.cancel.check()?;
        let Some(barrier) = &self.barrier else {
            return Ok(false);
        };
        let Some(first) = self.streamer.next(barrier)? else {
            self.barrier = None;
            return Ok(false);
        };
        let mut read = usize::from(!first.cached);
        let mut landed = vec![first];
        while landed.len() < EXPERTS_TOGETHER
            && read < self.together
            && let Some(next) = self.streamer.try_next(barrier)?
        {
            read += usize::from(!next.cached);
            landed.push(next);
        }
        self.run(&landed, run)?;
        Ok(true)
    }
}

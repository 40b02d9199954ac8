//! The experts of a pass, from the drives to the model.

use crate::error::Error;
use crate::generate::Cancel;
use crate::placement::Checksums;
use checkpoint::{Checkpoint, ExpertPart, TEXT_PREFIX, expert_tensor_name};
use drives::{Barrier, ExpertId, Landed, Streamer};
use kernels::{Elements, ExpertMatrices, Matrix};
use models::ExpertStream;

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
    barrier: Option<(usize, Barrier)>,
}

impl<'a> PassExperts<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        streamer: &'a mut Streamer,
        cancel: &'a Cancel,
        needed_bytes: &'a mut u64,
        checks: Option<Checks<'a>>,
    ) -> Self {
        Self {
            checkpoint,
            streamer,
            cancel,
            needed_bytes,
            checks,
            barrier: None,
        }
    }

    /// Gives an expert to the model. Whether its bytes are right as they landed.
    fn run(&mut self, layer: usize, landed: &Landed, run: &mut dyn FnMut(u32, &ExpertMatrices)) -> Result<bool, Error> {
        let c = self.checkpoint.config();
        let expert = landed.expert.expert as usize;
        let place = self.checkpoint.expert(layer, expert)?;
        // What stayed in memory was found right when it landed.
        let repaired = match &mut self.checks {
            _ if landed.cached => None,
            Some(Checks { checksums, bytes }) => checksums.check(landed.expert, &landed.lease, bytes)?,
            None => None,
        };
        // One tensor's bytes where they landed, or where they were mended.
        let part = |part: ExpertPart| {
            let at = place.part(part);
            let extent = repaired
                .as_ref()
                .map_or(landed.lease.extent(at.extent), |extents| &extents[at.extent]);
            &extent[at.offset as usize..][..at.len as usize]
        };
        let (inner, latent) = (c.moe_intermediate_size, c.routed_expert_hidden_size);
        let matrix = |rows, cols, packed, scale| -> Result<Matrix<'_>, Error> {
            let m = Matrix::new(
                rows,
                cols,
                Elements::Mxfp4 {
                    packed: part(packed),
                    scale: part(scale),
                },
            )?;
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
        let matrices = ExpertMatrices {
            gate: matrix(inner, latent, ExpertPart::W1Packed, ExpertPart::W1Scale)?,
            up: matrix(inner, latent, ExpertPart::W3Packed, ExpertPart::W3Scale)?,
            down: matrix(latent, inner, ExpertPart::W2Packed, ExpertPart::W2Scale)?,
        };
        run(landed.expert.expert, &matrices);
        Ok(repaired.is_none())
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
        self.barrier = Some((layer, self.streamer.demand(&ids)?));
        Ok(())
    }

    fn next(&mut self, run: &mut dyn FnMut(u32, &ExpertMatrices)) -> Result<bool, Error> {
        self.cancel.check()?;
        let Some((layer, barrier)) = &self.barrier else {
            return Ok(false);
        };
        let layer = *layer;
        match self.streamer.next(barrier)? {
            Some(landed) => {
                let sound = self.run(layer, &landed, run);
                if !matches!(sound, Ok(true)) {
                    self.streamer.forget(landed.expert);
                }
                sound.map(|_| true)
            }
            None => {
                self.barrier = None;
                Ok(false)
            }
        }
    }
}

//! The state of a virtio device in a snapshot: its registers on either transport, its rings, and
//! its configuration space.

use std::ops::RangeInclusive;

use podvisor_devices::pci::SavedMsix;
use podvisor_devices::virtio::transport::{SavedMmio, SavedPci, SavedTransport};
use podvisor_devices::virtio::{QueueConfig, QueueState, SavedConfig, SavedDevice};

use super::format::{Reader, Record, RecordKind, Writer};

/// The version of a device's registers, on both transports.
pub(super) const VERSION: u32 = 1;
/// The versions that can be read.
pub(super) const READABLE: RangeInclusive<u32> = 1..=VERSION;

/// A virtio device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceState {
    pub(crate) name: String,
    pub(crate) registers: SavedRegisters,
    /// The queues that run, and their positions in their rings.
    pub(crate) queues: Vec<(u16, QueueState)>,
    pub(crate) config: SavedConfig,
    pub(crate) own: SavedDevice,
}

/// A device's registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SavedRegisters {
    Mmio(SavedMmio),
    /// With the device's number on the bus.
    Pci(u8, SavedPci),
}

impl SavedRegisters {
    fn transport(&self) -> &SavedTransport {
        match self {
            Self::Mmio(saved) => &saved.transport,
            Self::Pci(_, saved) => &saved.transport,
        }
    }
}

impl DeviceState {
    pub(super) fn to_record(&self) -> Record {
        let mut out = Writer::default();
        let kind = match &self.registers {
            SavedRegisters::Mmio(saved) => {
                encode_mmio(&mut out, saved);
                RecordKind::Transport
            }
            SavedRegisters::Pci(slot, saved) => {
                out.u8(*slot);
                encode_pci(&mut out, saved);
                RecordKind::Function
            }
        };
        list(&mut out, &self.queues, |out, (index, state)| {
            out.u16(*index);
            out.u16(state.next_avail);
            out.u16(state.next_used);
        });
        out.u32(self.config.generation);
        out.bytes(&self.config.bytes);
        Record {
            kind,
            id: self.name.clone(),
            version: VERSION,
            bytes: out.finish(),
        }
    }

    /// Decodes `record`, of a device whose own state is `own`.
    pub(super) fn decode(
        input: &mut Reader<'_>,
        record: &Record,
        own: SavedDevice,
    ) -> Result<Self, &'static str> {
        let registers = if record.kind == RecordKind::Function {
            SavedRegisters::Pci(input.u8()?, decode_pci(input)?)
        } else {
            SavedRegisters::Mmio(decode_mmio(input)?)
        };
        let queues = input.short_list(registers.transport().queues.len(), |queue| {
            let index = queue.u16()?;
            let next_avail = queue.u16()?;
            let next_used = queue.u16()?;
            Ok((
                index,
                QueueState {
                    next_avail,
                    next_used,
                },
            ))
        })?;
        let config = SavedConfig {
            generation: input.u32()?,
            bytes: input.bytes()?.to_vec(),
        };
        Ok(Self {
            name: record.id.clone(),
            registers,
            queues,
            config,
            own,
        })
    }
}

fn list<T>(out: &mut Writer, elements: &[T], mut each: impl FnMut(&mut Writer, &T)) {
    out.u32(u32::try_from(elements.len()).unwrap_or(u32::MAX));
    elements.iter().for_each(|element| each(out, element));
}

fn encode_transport(out: &mut Writer, transport: &SavedTransport) {
    out.u8(transport.status);
    out.u8(u8::from(transport.needs_reset));
    out.u64(transport.features);
    list(out, &transport.queues, |out, queue| {
        out.u32(queue.size);
        out.u8(u8::from(queue.ready));
        out.u64(queue.desc_table);
        out.u64(queue.avail_ring);
        out.u64(queue.used_ring);
    });
}

fn decode_transport(input: &mut Reader<'_>) -> Result<SavedTransport, &'static str> {
    Ok(SavedTransport {
        status: input.u8()?,
        needs_reset: input.bool()?,
        features: input.u64()?,
        queues: input.list(|queue| {
            Ok(QueueConfig {
                size: queue.u32()?,
                ready: queue.bool()?,
                desc_table: queue.u64()?,
                avail_ring: queue.u64()?,
                used_ring: queue.u64()?,
            })
        })?,
    })
}

fn encode_mmio(out: &mut Writer, saved: &SavedMmio) {
    let SavedMmio {
        transport,
        interrupt_status,
        device_features_sel,
        driver_features_sel,
        queue_sel,
    } = saved;
    encode_transport(out, transport);
    out.u32(*interrupt_status);
    out.u32(*device_features_sel);
    out.u32(*driver_features_sel);
    out.u32(*queue_sel);
}

fn decode_mmio(input: &mut Reader<'_>) -> Result<SavedMmio, &'static str> {
    Ok(SavedMmio {
        transport: decode_transport(input)?,
        interrupt_status: input.u32()?,
        device_features_sel: input.u32()?,
        driver_features_sel: input.u32()?,
        queue_sel: input.u32()?,
    })
}

fn encode_pci(out: &mut Writer, saved: &SavedPci) {
    let SavedPci {
        transport,
        config,
        msix,
        config_vector,
        queue_vectors,
        isr,
        selectors: (device_features, driver_features, queue),
    } = saved;
    encode_transport(out, transport);
    out.bytes(config);
    list(out, &msix.table, |out, entry| {
        entry.iter().for_each(|word| out.u32(*word));
    });
    out.u64(msix.pending);
    out.u16(*config_vector);
    list(out, queue_vectors, |out, vector| out.u16(*vector));
    out.u8(*isr);
    out.u32(*device_features);
    out.u32(*driver_features);
    out.u16(*queue);
}

fn decode_pci(input: &mut Reader<'_>) -> Result<SavedPci, &'static str> {
    Ok(SavedPci {
        transport: decode_transport(input)?,
        config: input.bytes()?.to_vec(),
        msix: SavedMsix {
            table: input
                .list(|entry| Ok([entry.u32()?, entry.u32()?, entry.u32()?, entry.u32()?]))?,
            pending: input.u64()?,
        },
        config_vector: input.u16()?,
        queue_vectors: input.list(Reader::u16)?,
        isr: input.u8()?,
        selectors: (input.u32()?, input.u32()?, input.u16()?),
    })
}

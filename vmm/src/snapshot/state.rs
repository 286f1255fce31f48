//! All that a snapshot says of a VM, as records.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use podvisor_devices::virtio::transport::{SavedMmio, SavedTransport};
use podvisor_devices::virtio::{QueueConfig, QueueState, SavedConfig, SavedDevice};

use super::chips::{self, ChipState};
use super::format::{FormatError, Kind, Reader, Record, Writer};
use super::vcpu::{self, VcpuState};
use crate::boot::MAX_CPUS;
use crate::memory::{MemorySize, PAGE_SIZE};

const MACHINE_VERSION: u32 = 1;
const MEMORY_VERSION: u32 = 1;
const TRANSPORT_VERSION: u32 = 1;

/// The record of the serial port; devices have names like `blk0`.
const SERIAL: &str = "serial";

/// Tells a full snapshot from others, for its differences.
pub(crate) type Identity = [u8; 16];

/// A VM that stands still.
#[derive(Clone, Debug)]
pub(crate) struct MachineState {
    pub(crate) identity: Identity,
    pub(crate) memory: MemorySize,
    /// `None` when the memory file has all of it.
    pub(crate) base: Option<Base>,
    /// What the guest was told of its processors, but for their numbers.
    pub(crate) cpuid: CpuId,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) chips: ChipState,
    pub(crate) serial: Option<SavedDevice>,
    /// In the order in which they were added.
    pub(crate) devices: Vec<DeviceState>,
}

/// What a difference is the difference to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    /// The full snapshot's directory.
    pub(crate) path: PathBuf,
    pub(crate) identity: Identity,
    /// What the memory file holds, as offsets; the rest is the full snapshot's.
    pub(crate) ranges: Vec<Range<u64>>,
}

/// A virtio device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceState {
    pub(crate) name: String,
    pub(crate) registers: SavedMmio,
    /// The queues that run, and where they are in their rings.
    pub(crate) queues: Vec<(u16, QueueState)>,
    pub(crate) config: SavedConfig,
    pub(crate) own: SavedDevice,
}

impl MachineState {
    pub(crate) fn to_records(&self) -> Vec<Record> {
        let record = |kind, id: String, version, bytes| Record {
            kind,
            id,
            version,
            bytes,
        };
        let mut machine = Writer::default();
        machine.raw(&self.identity);
        machine.u64(self.memory.as_bytes());
        machine.u32(u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX));
        let cpuid = self.cpuid.as_slice();
        machine.u32(u32::try_from(cpuid.len()).unwrap_or(u32::MAX));
        cpuid.iter().for_each(|leaf| machine.abi(leaf));
        let memory = Base::encode(self.base.as_ref());
        let mut records = vec![
            record(
                Kind::Machine,
                String::new(),
                MACHINE_VERSION,
                machine.finish(),
            ),
            record(Kind::Memory, String::new(), MEMORY_VERSION, memory),
        ];
        for (id, vcpu) in self.vcpus.iter().enumerate() {
            let bytes = vcpu.encode();
            records.push(record(Kind::Vcpu, id.to_string(), vcpu::VERSION, bytes));
        }
        let chips = self.chips.encode();
        records.push(record(Kind::Chips, String::new(), chips::VERSION, chips));
        let device = |name: &str, saved: &SavedDevice| {
            let bytes = saved.bytes.clone();
            record(Kind::Device, name.to_owned(), saved.version, bytes)
        };
        records.extend(self.serial.as_ref().map(|saved| device(SERIAL, saved)));
        for state in &self.devices {
            let name = state.name.clone();
            let bytes = state.encode_transport();
            records.push(record(Kind::Transport, name, TRANSPORT_VERSION, bytes));
            records.push(device(&state.name, &state.own));
        }
        records
    }

    pub(crate) fn from_records(records: Vec<Record>) -> Result<Self, FormatError> {
        let missing = |what: String| FormatError::Invalid {
            what,
            why: "it is not there",
        };
        let find = |kind, id: &str| {
            let found = records.iter().find(|r| r.kind == kind && r.id == id);
            found.ok_or_else(|| missing(format!("the record {kind:?} {id}")))
        };
        let machine = find(Kind::Machine, "")?.parse(MACHINE_VERSION, |input| {
            let identity = input.raw(16)?.try_into().map_err(|_| "no identity")?;
            let (memory, count) = (MemorySize::bytes(input.u64()?), input.u32()?);
            let leaves: Vec<kvm_cpuid_entry2> = input.list(Reader::abi)?;
            let cpuid = CpuId::from_entries(&leaves).map_err(|_| "too many leaves of CPUID")?;
            Ok((identity, memory, count, cpuid))
        });
        let (identity, memory, count, cpuid): (Identity, _, _, _) = machine?;
        let invalid = |why| FormatError::Invalid {
            what: "the machine".to_owned(),
            why,
        };
        if memory < MemorySize::MIN || !memory.as_bytes().is_multiple_of(PAGE_SIZE) {
            return Err(invalid("a memory size that no guest has"));
        }
        if count == 0 || count > u32::from(MAX_CPUS) {
            return Err(invalid("a number of vCPUs that no guest has"));
        }
        let base = find(Kind::Memory, "")?.parse(MEMORY_VERSION, |input| {
            Base::decode(input, memory.as_bytes())
        })?;
        let vcpus: Vec<VcpuState> = (0..count)
            .map(|id| find(Kind::Vcpu, &id.to_string())?.parse(vcpu::VERSION, VcpuState::decode))
            .collect::<Result<_, _>>()?;
        let chips = find(Kind::Chips, "")?.parse(chips::VERSION, ChipState::decode)?;
        let own = |record: &Record| SavedDevice {
            version: record.version,
            bytes: record.bytes.clone(),
        };
        let serial = find(Kind::Device, SERIAL).ok().map(own);
        let transports = records.iter().filter(|r| r.kind == Kind::Transport);
        let devices: Vec<DeviceState> = transports
            .map(|record| {
                let own = own(find(Kind::Device, &record.id)?);
                record.parse(TRANSPORT_VERSION, |input| {
                    DeviceState::decode_transport(input, &record.id, own)
                })
            })
            .collect::<Result<_, _>>()?;
        // Everything was looked at.
        let expected = 3 + vcpus.len() + usize::from(serial.is_some()) + 2 * devices.len();
        if records.len() != expected {
            return Err(invalid("records that belong to nothing"));
        }
        Ok(Self {
            identity,
            memory,
            base,
            cpuid,
            vcpus,
            chips,
            serial,
            devices,
        })
    }
}

impl Base {
    fn encode(base: Option<&Self>) -> Vec<u8> {
        let mut out = Writer::default();
        out.u8(u8::from(base.is_some()));
        if let Some(base) = base {
            out.bytes(base.path.as_os_str().as_bytes());
            out.raw(&base.identity);
            out.u32(u32::try_from(base.ranges.len()).unwrap_or(u32::MAX));
            for range in &base.ranges {
                out.u64(range.start);
                out.u64(range.end);
            }
        }
        out.finish()
    }

    fn decode(input: &mut Reader<'_>, memory: u64) -> Result<Option<Self>, &'static str> {
        if !input.bool()? {
            return Ok(None);
        }
        let path = PathBuf::from(OsStr::from_bytes(input.bytes()?));
        let identity = input.raw(16)?.try_into().map_err(|_| "no identity")?;
        let mut last = 0;
        let ranges = input.list(|range| {
            let range = range.u64()?..range.u64()?;
            if range.start < last || range.end <= range.start || range.end > memory {
                return Err("ranges out of order, or beyond the guest's memory");
            }
            last = range.end;
            Ok(range)
        })?;
        Ok(Some(Self {
            path,
            identity,
            ranges,
        }))
    }
}

impl DeviceState {
    fn encode_transport(&self) -> Vec<u8> {
        let SavedMmio {
            transport,
            interrupt_status,
            device_features_sel,
            driver_features_sel,
            queue_sel,
        } = &self.registers;
        let mut out = Writer::default();
        out.u8(transport.status);
        out.u8(u8::from(transport.needs_reset));
        out.u64(transport.features);
        out.u32(u32::try_from(transport.queues.len()).unwrap_or(u32::MAX));
        for queue in &transport.queues {
            out.u32(queue.size);
            out.u8(u8::from(queue.ready));
            out.u64(queue.desc_table);
            out.u64(queue.avail_ring);
            out.u64(queue.used_ring);
        }
        out.u32(*interrupt_status);
        out.u32(*device_features_sel);
        out.u32(*driver_features_sel);
        out.u32(*queue_sel);
        out.u32(u32::try_from(self.queues.len()).unwrap_or(u32::MAX));
        for (index, state) in &self.queues {
            out.u16(*index);
            out.u16(state.next_avail);
            out.u16(state.next_used);
        }
        out.u32(self.config.generation);
        out.bytes(&self.config.bytes);
        out.finish()
    }

    fn decode_transport(
        input: &mut Reader<'_>,
        name: &str,
        own: SavedDevice,
    ) -> Result<Self, &'static str> {
        let transport = SavedTransport {
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
        };
        let registers = SavedMmio {
            transport,
            interrupt_status: input.u32()?,
            device_features_sel: input.u32()?,
            driver_features_sel: input.u32()?,
            queue_sel: input.u32()?,
        };
        let queues = input.list(|queue| {
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
            name: name.to_owned(),
            registers,
            queues,
            config,
            own,
        })
    }
}

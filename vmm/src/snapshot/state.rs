//! All state of a VM in a snapshot, as records.

use std::ffi::OsStr;
use std::ops::{Range, RangeInclusive};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use podvisor_devices::virtio::SavedDevice;

use super::chips::{self, ChipState};
use super::cpu;
use super::device::{self, DeviceState};
use super::error::SnapshotError;
use super::format::{self, Reader, Record, RecordKind, SnapshotFormatError, Writer};
use super::vcpu::{self, VcpuState};
use super::working_set::{self, WorkingSet};
use crate::boot::MAX_CPUS;
use crate::memory::{HOTPLUG_UNIT, MemoryShape, MemorySize, PAGE_SIZE};
use crate::transport::Transport;

const MACHINE_VERSION: u32 = 3;
const MEMORY_VERSION: u32 = 1;
const PCI_VERSION: u32 = 1;

/// The versions of these that can be read.
const MACHINE_READABLE: RangeInclusive<u32> = 3..=MACHINE_VERSION;
const MEMORY_READABLE: RangeInclusive<u32> = 1..=MEMORY_VERSION;
const PCI_READABLE: RangeInclusive<u32> = 1..=PCI_VERSION;

/// More than any host has, and far from the end of the address space.
const MAX_MEMORY: MemorySize = MemorySize::gib(1 << 20);

/// The name of the device that plugs memory in.
const MEMORY_DEVICE: &str = "mem0";

/// The record of the serial port; devices have names like `blk0`.
const SERIAL: &str = "serial";
/// The record of the register of events.
const EVENTS: &str = "events";
/// The record of a firmware's devices.
const FIRMWARE: &str = "firmware";

/// Identifies a full snapshot, for its differences.
pub(crate) type Identity = [u8; 16];

/// The state of a paused VM.
#[derive(Clone, Debug)]
pub(crate) struct MachineState {
    pub(crate) identity: Identity,
    pub(crate) memory: MemoryShape,
    /// `None` if the memory file has all of it.
    pub(crate) base: Option<Base>,
    /// The guest's CPUID, except for the vCPUs' numbers.
    pub(crate) cpuid: CpuId,
    pub(crate) vcpus: Vec<VcpuState>,
    /// The maximum number of vCPUs.
    pub(crate) max_vcpus: u8,
    pub(crate) chips: ChipState,
    pub(crate) serial: Option<SavedDevice>,
    /// The register of events; `None` if the guest is told of none.
    pub(crate) events: Option<SavedDevice>,
    /// The devices of a firmware; `None` if the VM has not booted by one.
    pub(crate) firmware: Option<SavedDevice>,
    /// `CONFIG_ADDRESS` of the PCI bus; `None` if devices are on MMIO.
    pub(crate) pci: Option<u32>,
    /// In the order in which they were added.
    pub(crate) devices: Vec<DeviceState>,
    /// The pages that are copied up front when a VM is restored.
    pub(crate) working_set: Option<WorkingSet>,
}

/// The full snapshot that a difference is based on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    /// The full snapshot's directory.
    pub(crate) path: PathBuf,
    pub(crate) identity: Identity,
    /// The ranges in the memory file, as offsets; the rest is the full snapshot's.
    pub(crate) ranges: Vec<Range<u64>>,
}

impl MachineState {
    /// Returns the transport of the devices.
    pub(crate) fn transport(&self) -> Transport {
        match self.pci {
            None => Transport::Mmio,
            Some(_) => Transport::Pci,
        }
    }

    /// Returns the names of the devices that whoever restores it has to give, in order: the memory
    /// device comes with the memory.
    pub(crate) fn builders_devices(&self) -> Vec<String> {
        let own = self.memory_device();
        let devices = self.devices.iter().enumerate();
        devices
            .filter(|(place, _)| Some(*place) != own)
            .map(|(_, device)| device.name.clone())
            .collect()
    }

    /// Returns the index of the memory device among the devices.
    pub(crate) fn memory_device(&self) -> Option<usize> {
        self.memory.hotplug_region()?;
        let mut devices = self.devices.iter();
        devices.position(|device| device.name == MEMORY_DEVICE)
    }

    /// Checks that this host has the CPU features that the guest knows.
    pub(crate) fn check_cpu(&self, here: &[kvm_cpuid_entry2]) -> Result<(), SnapshotError> {
        cpu::check(self.cpuid.as_slice(), here).map_err(SnapshotError::Cpu)
    }

    /// Lets time pass for the guest: its clocks go on from later.
    pub(crate) fn advance(&mut self, time: Duration) {
        self.chips.advance(time);
        for vcpu in &mut self.vcpus {
            vcpu.advance(time);
        }
    }

    /// Encodes the state of a snapshot that is to be in `dir`.
    pub(super) fn encode(&self, dir: &Path) -> Result<Vec<u8>, SnapshotError> {
        let bytes = format::encode(&self.to_records());
        let (len, most) = (bytes.len() as u64, format::MAX_LEN);
        if len > most {
            let path = dir.to_owned();
            return Err(SnapshotError::StateTooLong { path, len, most });
        }
        Ok(bytes)
    }

    pub(crate) fn to_records(&self) -> Vec<Record> {
        let record = |kind, id: String, version, bytes| Record {
            kind,
            id,
            version,
            bytes,
        };
        let mut machine = Writer::default();
        machine.raw(&self.identity);
        machine.u64(self.memory.boot.as_bytes());
        machine.u64(self.memory.hotplug.as_bytes());
        machine.u32(u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX));
        machine.u8(self.max_vcpus);
        let cpuid = self.cpuid.as_slice();
        machine.u32(u32::try_from(cpuid.len()).unwrap_or(u32::MAX));
        cpuid.iter().for_each(|leaf| machine.abi(leaf));
        let memory = Base::encode(self.base.as_ref());
        let mut records = vec![
            record(
                RecordKind::Machine,
                String::new(),
                MACHINE_VERSION,
                machine.finish(),
            ),
            record(RecordKind::Memory, String::new(), MEMORY_VERSION, memory),
        ];
        for (id, vcpu) in self.vcpus.iter().enumerate() {
            let bytes = vcpu.encode();
            records.push(record(
                RecordKind::Vcpu,
                id.to_string(),
                vcpu::VERSION,
                bytes,
            ));
        }
        let chips = self.chips.encode();
        records.push(record(
            RecordKind::Chips,
            String::new(),
            chips::VERSION,
            chips,
        ));
        if let Some(address) = self.pci {
            let mut pci = Writer::default();
            pci.u32(address);
            records.push(record(
                RecordKind::Pci,
                String::new(),
                PCI_VERSION,
                pci.finish(),
            ));
        }
        let device = |name: &str, saved: &SavedDevice| {
            let bytes = saved.bytes.clone();
            record(RecordKind::Device, name.to_owned(), saved.version, bytes)
        };
        records.extend(self.serial.as_ref().map(|saved| device(SERIAL, saved)));
        records.extend(self.events.as_ref().map(|saved| device(EVENTS, saved)));
        records.extend(self.firmware.as_ref().map(|saved| device(FIRMWARE, saved)));
        for state in &self.devices {
            records.push(state.to_record());
            records.push(device(&state.name, &state.own));
        }
        records.extend(self.working_set.as_ref().map(|set| {
            let bytes = set.encode();
            record(
                RecordKind::WorkingSet,
                String::new(),
                working_set::VERSION,
                bytes,
            )
        }));
        records
    }

    pub(crate) fn from_records(records: Vec<Record>) -> Result<Self, SnapshotFormatError> {
        let missing = |what: String| SnapshotFormatError::Invalid {
            what,
            why: "it is not there",
        };
        let find = |kind, id: &str| {
            let found = records.iter().find(|r| r.kind == kind && r.id == id);
            found.ok_or_else(|| missing(format!("the record {kind:?} {id}")))
        };
        let machine = find(RecordKind::Machine, "")?.parse(MACHINE_READABLE, |input, _| {
            let identity = input.raw(16)?.try_into().map_err(|_| "no identity")?;
            let memory = MemoryShape {
                boot: MemorySize::bytes(input.u64()?),
                hotplug: MemorySize::bytes(input.u64()?),
            };
            let count = input.u32()?;
            let max_vcpus = input.u8()?;
            let leaves: Vec<kvm_cpuid_entry2> = input.list(Reader::abi)?;
            let cpuid = CpuId::from_entries(&leaves).map_err(|_| "too many leaves of CPUID")?;
            Ok((identity, memory, (count, max_vcpus), cpuid))
        });
        let (identity, memory, (count, max_vcpus), cpuid): (Identity, _, _, _) = machine?;
        let invalid = |why| SnapshotFormatError::Invalid {
            what: "the machine".to_owned(),
            why,
        };
        let MemoryShape { boot, hotplug } = memory;
        let whole = boot.as_bytes().is_multiple_of(PAGE_SIZE)
            && hotplug.as_bytes().is_multiple_of(HOTPLUG_UNIT);
        if boot < MemorySize::MIN || boot > MAX_MEMORY || hotplug > MAX_MEMORY || !whole {
            return Err(invalid("a memory size that no guest has"));
        }
        if count == 0 || count > u32::from(max_vcpus) || max_vcpus > MAX_CPUS {
            return Err(invalid("a number of vCPUs that no guest has"));
        }
        let base = find(RecordKind::Memory, "")?.parse(MEMORY_READABLE, |input, _| {
            Base::decode(input, memory.total().as_bytes())
        })?;
        let vcpus: Vec<VcpuState> = (0..count)
            .map(|id| {
                find(RecordKind::Vcpu, &id.to_string())?
                    .parse(vcpu::READABLE, |input, _| VcpuState::decode(input))
            })
            .collect::<Result<_, _>>()?;
        let chips = find(RecordKind::Chips, "")?
            .parse(chips::READABLE, |input, _| ChipState::decode(input))?;
        let own = |record: &Record| SavedDevice {
            version: record.version,
            bytes: record.bytes.clone(),
        };
        let serial = find(RecordKind::Device, SERIAL).ok().map(own);
        let events = find(RecordKind::Device, EVENTS).ok().map(own);
        let firmware = find(RecordKind::Device, FIRMWARE).ok().map(own);
        let pci = match find(RecordKind::Pci, "") {
            Ok(record) => Some(record.parse(PCI_READABLE, |input, _| input.u32())?),
            Err(_) => None,
        };
        let transport = match pci {
            None => RecordKind::Transport,
            Some(_) => RecordKind::Function,
        };
        let transports = records.iter().filter(|r| r.kind == transport);
        let devices: Vec<DeviceState> = transports
            .map(|record| {
                let own = own(find(RecordKind::Device, &record.id)?);
                record.parse(device::READABLE, |input, _| {
                    DeviceState::decode(input, record, own)
                })
            })
            .collect::<Result<_, _>>()?;
        let working_set = match find(RecordKind::WorkingSet, "") {
            Ok(record) => Some(record.parse(working_set::READABLE, |input, _| {
                WorkingSet::decode(input, boot.as_bytes())
            })?),
            Err(_) => None,
        };
        // A file is read completely or not at all: what an unknown record says would be lost.
        let is_used = |record: &Record| match record.kind {
            RecordKind::Machine
            | RecordKind::Memory
            | RecordKind::Chips
            | RecordKind::Pci
            | RecordKind::WorkingSet => record.id.is_empty(),
            RecordKind::Vcpu => (0..count).any(|id| record.id == id.to_string()),
            RecordKind::Transport | RecordKind::Function => record.kind == transport,
            RecordKind::Device => {
                let own = [SERIAL, EVENTS, FIRMWARE].into_iter();
                let mut all = own.chain(devices.iter().map(|device| &*device.name));
                all.any(|name| name == record.id)
            }
        };
        if let Some(record) = records.iter().find(|record| !is_used(record)) {
            return Err(SnapshotFormatError::Invalid {
                what: record.name(),
                why: "it belongs to nothing",
            });
        }
        Ok(Self {
            identity,
            memory,
            base,
            cpuid,
            vcpus,
            max_vcpus,
            chips,
            serial,
            events,
            firmware,
            pci,
            devices,
            working_set,
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

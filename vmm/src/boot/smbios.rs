//! SMBIOS tables (DMTF DSP0134, version 3.6): what a machine is called, for operating systems that
//! read their identity from firmware.
//!
//! [`write()`] puts the 64-bit entry point and the structures behind the ACPI tables, in the part
//! of memory where kernels look for it (§5.2.2).

use podvisor_devices::GuestRam;

use super::{BootError, write as put};

/// The longest string.
pub(super) const MAX_STRING: usize = 255;
/// The most OEM strings: a byte counts them.
const MAX_OEM_STRINGS: usize = 64;
/// The alignment of the entry point.
const ALIGNMENT: u64 = 16;

const BIOS: u8 = 0;
const SYSTEM: u8 = 1;
const BOARD: u8 = 2;
const CHASSIS: u8 = 3;
const OEM_STRINGS: u8 = 11;
const SYSTEM_BOOT: u8 = 32;
const END: u8 = 127;

/// Structures are numbered by these handles.
const CHASSIS_HANDLE: u16 = 3;

/// The identity of a machine, as its firmware names it ([`VmBuilder::smbios`]). Linux shows it in
/// `/sys/class/dmi/id`.
///
/// [`VmBuilder::smbios`]: crate::VmBuilder::smbios
///
/// ```
/// use podvisor_vmm::Smbios;
///
/// let identity = Smbios::new()
///     .uuid([0x11; 16])
///     .serial("ds=nocloud;h=one")
///     .manufacturer("Example")
///     .product("Machine");
/// # let _ = identity;
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Smbios {
    uuid: [u8; 16],
    manufacturer: String,
    product: String,
    version: String,
    serial: String,
    sku: String,
    family: String,
    chassis: Chassis,
    oem_strings: Vec<String>,
}

/// What the enclosure of a machine is called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Chassis {
    manufacturer: String,
    version: String,
    serial: String,
    asset_tag: String,
    sku: String,
}

impl Smbios {
    /// Returns an identity without a UUID, of manufacturer `podvisor` and product `virtual
    /// machine`.
    pub fn new() -> Self {
        Self {
            manufacturer: "podvisor".to_owned(),
            product: "virtual machine".to_owned(),
            ..Self::default()
        }
    }

    /// The machine's UUID, its bytes in the order in which they are written as text.
    pub fn uuid(mut self, uuid: [u8; 16]) -> Self {
        self.uuid = uuid;
        self
    }

    /// The manufacturer of the system, its board, and its chassis unless that has its own.
    pub fn manufacturer(mut self, name: impl Into<String>) -> Self {
        self.manufacturer = name.into();
        self
    }

    /// The product name of the system and its board.
    pub fn product(mut self, name: impl Into<String>) -> Self {
        self.product = name.into();
        self
    }

    /// The version of the product.
    pub fn version(mut self, version: impl Into<String>) -> Self {
        self.version = version.into();
        self
    }

    /// The serial number of the system.
    pub fn serial(mut self, serial: impl Into<String>) -> Self {
        self.serial = serial.into();
        self
    }

    /// The SKU number of the system.
    pub fn sku(mut self, sku: impl Into<String>) -> Self {
        self.sku = sku.into();
        self
    }

    /// The family of products.
    pub fn family(mut self, family: impl Into<String>) -> Self {
        self.family = family.into();
        self
    }

    /// The manufacturer of the chassis.
    pub fn chassis_manufacturer(mut self, name: impl Into<String>) -> Self {
        self.chassis.manufacturer = name.into();
        self
    }

    /// The version of the chassis.
    pub fn chassis_version(mut self, version: impl Into<String>) -> Self {
        self.chassis.version = version.into();
        self
    }

    /// The serial number of the chassis.
    pub fn chassis_serial(mut self, serial: impl Into<String>) -> Self {
        self.chassis.serial = serial.into();
        self
    }

    /// The asset tag of the chassis.
    pub fn chassis_asset_tag(mut self, tag: impl Into<String>) -> Self {
        self.chassis.asset_tag = tag.into();
        self
    }

    /// The SKU number of the chassis.
    pub fn chassis_sku(mut self, sku: impl Into<String>) -> Self {
        self.chassis.sku = sku.into();
        self
    }

    /// A string of the owner's, such as a credential for systemd
    /// (`io.systemd.credential:NAME=VALUE`); up to 64.
    pub fn oem_string(mut self, string: impl Into<String>) -> Self {
        self.oem_strings.push(string.into());
        self
    }

    /// Finds what is wrong with it: the field, and why.
    pub(crate) fn mistakes(&self) -> Vec<(&'static str, &'static str)> {
        let fields = [
            ("manufacturer", &self.manufacturer),
            ("product", &self.product),
            ("version", &self.version),
            ("serial", &self.serial),
            ("SKU", &self.sku),
            ("family", &self.family),
            ("chassis manufacturer", &self.chassis.manufacturer),
            ("chassis version", &self.chassis.version),
            ("chassis serial", &self.chassis.serial),
            ("chassis asset tag", &self.chassis.asset_tag),
            ("chassis SKU", &self.chassis.sku),
        ];
        let oem = self.oem_strings.iter().map(|string| ("OEM string", string));
        let all = fields.into_iter().chain(oem);
        let mut mistakes: Vec<_> = all
            .filter_map(|(field, string)| Some((field, mistake(string)?)))
            .collect();
        if self.oem_strings.iter().any(String::is_empty) {
            mistakes.push(("OEM string", "it is empty"));
        }
        if self.oem_strings.len() > MAX_OEM_STRINGS {
            mistakes.push(("OEM strings", "there are more than 64"));
        }
        mistakes
    }

    fn structures(&self) -> Vec<u8> {
        let mut all = Vec::new();
        let mut bios = Structure::new(BIOS, 0);
        bios.string("podvisor").string(env!("CARGO_PKG_VERSION"));
        bios.word(0); // no segment: it is not at an address
        bios.string("01/01/2026").byte(0); // no ROM
        bios.bytes(&(1u64 << 3).to_le_bytes()); // characteristics are not given
        bios.bytes(&[0, 1 << 4]); // a virtual machine
        bios.bytes(&[0xff; 4]); // no releases of BIOS and embedded controller
        bios.write(&mut all);

        let mut system = Structure::new(SYSTEM, 1);
        system.string(&self.manufacturer).string(&self.product);
        system.string(&self.version).string(&self.serial);
        system.bytes(&wire_uuid(self.uuid));
        system.byte(6); // woken by the power switch
        system.string(&self.sku).string(&self.family);
        system.write(&mut all);

        let mut board = Structure::new(BOARD, 2);
        board.string(&self.manufacturer).string(&self.product);
        board.string(&self.version).string("").string("");
        board.byte(1); // hosts the processor
        board.string("").word(CHASSIS_HANDLE);
        board.bytes(&[0x0a, 0]); // a motherboard that contains nothing else
        board.write(&mut all);

        let own = &self.chassis;
        let manufacturer = match own.manufacturer.is_empty() {
            true => &self.manufacturer,
            false => &own.manufacturer,
        };
        let mut chassis = Structure::new(CHASSIS, CHASSIS_HANDLE);
        chassis.string(manufacturer).byte(1); // of another type
        chassis.string(&own.version).string(&own.serial);
        chassis.string(&own.asset_tag);
        chassis.bytes(&[3, 3, 3, 2]); // safe, safe, safe, security unknown
        chassis.bytes(&[0; 4]); // the OEM's
        chassis.bytes(&[0; 4]); // height, power cords, contained elements and their length
        chassis.string(&own.sku);
        chassis.write(&mut all);

        if !self.oem_strings.is_empty() {
            let mut oem = Structure::new(OEM_STRINGS, 11);
            oem.byte(self.oem_strings.len() as u8);
            for string in &self.oem_strings {
                oem.strings.push(string);
            }
            oem.write(&mut all);
        }
        let mut boot = Structure::new(SYSTEM_BOOT, 32);
        boot.bytes(&[0; 7]); // reserved, and no error
        boot.write(&mut all);
        Structure::new(END, END.into()).write(&mut all);
        all
    }
}

/// Returns why a string cannot be in the tables.
fn mistake(string: &str) -> Option<&'static str> {
    if string.len() > MAX_STRING {
        return Some("it is longer than 255 bytes");
    }
    // A NUL ends a string, and others garble what shows it.
    let is_control = string.chars().any(char::is_control);
    is_control.then_some("it has a control character")
}

/// Returns a UUID as the tables have it (§7.2.1): the first three fields with the least significant
/// byte first.
fn wire_uuid(uuid: [u8; 16]) -> [u8; 16] {
    let mut wire = uuid;
    wire[..4].reverse();
    wire[4..6].reverse();
    wire[6..8].reverse();
    wire
}

/// A structure (§6.1) under construction: its formatted part, and its strings.
struct Structure<'a> {
    formatted: Vec<u8>,
    strings: Vec<&'a str>,
}

impl<'a> Structure<'a> {
    fn new(kind: u8, handle: u16) -> Self {
        let [low, high] = handle.to_le_bytes();
        Self {
            formatted: vec![kind, 0, low, high],
            strings: Vec::new(),
        }
    }

    fn byte(&mut self, byte: u8) -> &mut Self {
        self.bytes(&[byte])
    }

    fn word(&mut self, word: u16) -> &mut Self {
        self.bytes(&word.to_le_bytes())
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.formatted.extend_from_slice(bytes);
        self
    }

    /// Refers to a string, by its number; 0 if it is empty.
    fn string(&mut self, string: &'a str) -> &mut Self {
        if string.is_empty() {
            return self.byte(0);
        }
        self.strings.push(string);
        // There are fewer than ten in each.
        let number = self.strings.len() as u8;
        self.byte(number)
    }

    fn write(mut self, all: &mut Vec<u8>) {
        self.formatted[1] = self.formatted.len() as u8;
        all.append(&mut self.formatted);
        for string in &self.strings {
            all.extend_from_slice(string.as_bytes());
            all.push(0);
        }
        // Strings end with an empty one, and without any there are two NULs.
        all.extend_from_slice(if self.strings.is_empty() {
            &[0, 0]
        } else {
            &[0]
        });
    }
}

/// Writes entry point and structures from `start` on, and below `limit`; returns their end.
pub(super) fn write(
    mem: &GuestRam,
    start: u64,
    limit: u64,
    identity: &Smbios,
) -> Result<u64, BootError> {
    let entry = start.next_multiple_of(ALIGNMENT);
    let mut bytes = entry_point(entry, &identity.structures());
    bytes.extend(identity.structures());
    let end = entry.saturating_add(bytes.len() as u64);
    if end > limit {
        return Err(BootError::MemoryLayout);
    }
    put(mem, "the SMBIOS tables", entry, &bytes)?;
    Ok(end)
}

/// The 64-bit entry point (§5.2.2), which lies at `address`, before the structures.
fn entry_point(address: u64, structures: &[u8]) -> Vec<u8> {
    const LEN: u8 = 24;
    let mut bytes = b"_SM3_".to_vec();
    // Checksum, length, version 3.6.0, revision of the entry point, reserved.
    bytes.extend([0, LEN, 3, 6, 0, 1, 0]);
    bytes.extend((structures.len() as u32).to_le_bytes());
    bytes.extend((address + u64::from(LEN)).to_le_bytes());
    let sum = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    bytes[5] = sum.wrapping_neg();
    bytes
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::layout;

    fn written(identity: &Smbios) -> Vec<u8> {
        let mem = GuestRam::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        let start = layout::MP_TABLE + 0x123;
        write(&mem, start, layout::HIMEM_START, identity).unwrap();
        let mut all = vec![0; 0x1_0000];
        mem.read_slice(&mut all, GuestAddress(layout::MP_TABLE))
            .unwrap();
        all
    }

    /// Finds the entry point as a kernel does, and returns the structures.
    fn found(all: &[u8]) -> &[u8] {
        let paragraphs = all.chunks(16).position(|bytes| bytes.starts_with(b"_SM3_"));
        let at = paragraphs.unwrap() * 16;
        let entry = &all[at..at + 24];
        assert_eq!(entry.iter().fold(0u8, |sum, b| sum.wrapping_add(*b)), 0);
        assert_eq!((entry[6], entry[7]), (24, 3));
        let len = u32::from_le_bytes(entry[12..16].try_into().unwrap()) as usize;
        let address = u64::from_le_bytes(entry[16..24].try_into().unwrap());
        let start = usize::try_from(address - layout::MP_TABLE).unwrap();
        &all[start..start + len]
    }

    /// Returns the formatted part and the strings of each structure.
    fn parse(mut rest: &[u8]) -> Vec<(&[u8], Vec<&str>)> {
        let mut all = Vec::new();
        while let [_, length, ..] = *rest {
            let (formatted, strings) = rest.split_at(usize::from(length));
            let end = strings.windows(2).position(|two| two == [0, 0]).unwrap();
            let list = strings[..end].split(|byte| *byte == 0);
            let list = list.filter(|string| !string.is_empty());
            let list = list.map(|string| std::str::from_utf8(string).unwrap());
            all.push((formatted, list.collect()));
            rest = &strings[end + 2..];
        }
        all
    }

    #[test]
    fn a_kernel_finds_the_identity_that_the_owner_gave() {
        let identity = Smbios::new()
            .uuid(*b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff")
            .serial("ds=nocloud")
            .family("small")
            .chassis_asset_tag("tag")
            .oem_string("one")
            .oem_string("two");
        let all = written(&identity);
        let structures = parse(found(&all));
        let kinds: Vec<_> = structures.iter().map(|(bytes, _)| bytes[0]).collect();
        assert_eq!(kinds, [0, 1, 2, 3, 11, 32, 127]);
        let lengths: Vec<_> = structures.iter().map(|(bytes, _)| bytes[1]).collect();
        assert_eq!(lengths, [0x18, 0x1b, 0x0f, 0x16, 5, 11, 4]);
        let (system, strings) = &structures[1];
        let string = |at: usize| match system[at] {
            0 => "",
            number => strings[usize::from(number) - 1],
        };
        let named = [4, 5, 6, 7, 0x19, 0x1a].map(string);
        let expected = ["podvisor", "virtual machine", "", "ds=nocloud", "", "small"];
        assert_eq!(named, expected);
        assert_eq!(
            system[8..24],
            *b"\x33\x22\x11\x00\x55\x44\x77\x66\x88\x99\xaa\xbb\xcc\xdd\xee\xff"
        );
        assert_eq!(structures[3].1, ["podvisor", "tag"]);
        assert_eq!(
            (structures[4].0[4], &*structures[4].1),
            (2, &["one", "two"][..])
        );
        let board = structures[2].0;
        assert_eq!(board[11..13], structures[3].0[2..4], "the chassis' handle");
    }

    #[test]
    fn strings_that_the_tables_cannot_have_are_named() {
        let long = |len| Smbios::new().serial("x".repeat(len));
        assert_eq!(long(255).mistakes(), []);
        assert_eq!(
            long(256).mistakes(),
            [("serial", "it is longer than 255 bytes")]
        );
        let control = Smbios::new().family("a\0b").chassis_sku("a\nb");
        let fields: Vec<_> = control.mistakes().iter().map(|(field, _)| *field).collect();
        assert_eq!(fields, ["family", "chassis SKU"]);
        let oem = |count| (0..count).fold(Smbios::new(), |all, _| all.oem_string("x"));
        assert_eq!(oem(64).mistakes(), []);
        assert_eq!(oem(65).mistakes().len(), 1);
        let empty = Smbios::new().oem_string("").mistakes();
        assert_eq!(empty, [("OEM string", "it is empty")]);
    }

    #[test]
    fn the_largest_identity_fits_behind_the_tables_of_the_largest_machine() {
        let string = "x".repeat(MAX_STRING);
        let identity = (0..MAX_OEM_STRINGS).fold(Smbios::new(), |all, _| all.oem_string(&*string));
        let bytes = identity.structures().len();
        assert!(bytes < 0x5000, "{bytes}");
        let mem = GuestRam::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        let limit = layout::HIMEM_START;
        let error = write(&mem, limit - 256, limit, &identity).unwrap_err();
        assert!(matches!(error, BootError::MemoryLayout), "{error}");
    }
}

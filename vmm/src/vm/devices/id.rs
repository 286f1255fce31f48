//! Ids of devices: those that the program chooses, and those of the others, which are their type
//! and a number.

use podvisor_devices::virtio::DeviceType;

/// The name under which vCPUs are counted beside devices.
const VCPU: &str = "vcpu";

/// Longest id that a program chooses, in bytes.
const MAX_LEN: usize = 32;

/// All types, of which the names are those of devices without an id.
const TYPES: [DeviceType; 10] = [
    DeviceType::Net,
    DeviceType::Block,
    DeviceType::Console,
    DeviceType::Entropy,
    DeviceType::Balloon,
    DeviceType::Vsock,
    DeviceType::Mem,
    DeviceType::FileSystem,
    DeviceType::Pmem,
    DeviceType::Other(0),
];

/// Why a text is not an id that a program may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdFault {
    Form,
    Reserved,
    Taken,
}

impl IdFault {
    /// Says what is wrong, and what would be right.
    pub(crate) fn why(self) -> &'static str {
        match self {
            Self::Form => "begin with a letter, and take 1 to 32 letters, digits, `-` and `_`",
            Self::Reserved => "devices without an id are named so: take a word of your own",
            Self::Taken => "another device of the VM has it",
        }
    }
}

/// Checks an id that the program has chosen.
pub(crate) fn check(id: &str) -> Result<(), IdFault> {
    let has_form = id.len() <= MAX_LEN
        && id.starts_with(|first: char| first.is_ascii_alphabetic())
        && id
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    if !has_form {
        return Err(IdFault::Form);
    }
    match id == VCPU || type_of(id).is_some() {
        true => Err(IdFault::Reserved),
        false => Ok(()),
    }
}

/// Returns the name of the type of a device without an id; `None` if the program has chosen it.
pub(crate) fn type_of(name: &str) -> Option<&'static str> {
    let type_name = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let mut types = TYPES.iter().map(|one| one.name());
    types.find(|one| *one == type_name && one.len() < name.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_a_word_that_no_device_without_an_id_has() {
        for good in ["root", "data-1", "Swap_2", "blk", "net0a", "x"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        let long = "x".repeat(33);
        for bad in ["", "1", "-a", "a b", "a/b", "é", &long] {
            assert_eq!(check(bad), Err(IdFault::Form), "{bad}");
        }
        for reserved in ["vcpu", "blk0", "mem0", "other12", "vsock07"] {
            assert_eq!(check(reserved), Err(IdFault::Reserved), "{reserved}");
        }
    }
}

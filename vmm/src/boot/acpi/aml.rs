//! What the code of several devices has in it, in ACPI's machine language (AML).

use acpi_tables::aml::{Name, Path, ResourceTemplate};
use acpi_tables::{Aml, AmlSink};

/// The notification (ACPI 6.5 §5.6.6) of a device that may have come: look whether it is there.
pub(super) const DEVICE_CHECK: u8 = 1;

/// A named value of a device's scope.
pub(super) fn name(of: &str, value: &dyn Aml) -> Name {
    Name::new(Path::new(of), value)
}

/// The resources that a device uses (ACPI 6.5 §6.2.2).
pub(super) fn resources(of: Vec<&dyn Aml>) -> Name {
    name("_CRS", &ResourceTemplate::new(of))
}

/// Code that is there already.
pub(super) struct Code(pub(super) Vec<u8>);

impl Aml for Code {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}

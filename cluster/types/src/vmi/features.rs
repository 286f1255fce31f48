//! Features of the machine (`spec.domain.features`).

use serde_json::Value;

use super::Domain;
use crate::{Causes, FieldPath};

object! {
    /// Features of the machine.
    pub struct Features {
        /// ACPI: without it the guest is killed, not shut down, and has no power button.
        pub acpi: Option<FeatureState>,
        /// The local APIC: always on.
        pub apic: Option<ApicFeature>,
        /// What the guest sees of KVM.
        pub kvm: Option<KvmFeature>,
        /// Paravirtual spinlocks.
        pub pvspinlock: Option<FeatureState>,
        /// Refused.
        pub smm: Option<Value>,
        /// Refused.
        pub hyperv: Option<Value>,
        /// Refused.
        pub hyperv_passthrough: Option<Value>,
    }

    /// On or off.
    pub struct FeatureState {
        /// Whether it is on; it is where nothing is said.
        pub enabled: Option<bool>,
    }

    /// The local APIC.
    pub struct ApicFeature {
        /// Whether it is on; it is where nothing is said.
        pub enabled: Option<bool>,
        /// The guest ends interrupts without an exit: with KVM every guest may.
        pub end_of_interrupt: Option<bool>,
    }

    /// What the guest sees of KVM.
    pub struct KvmFeature {
        /// Hides it.
        pub hidden: Option<bool>,
    }
}

impl Features {
    /// Whether the guest has ACPI, and with it a power button.
    #[must_use]
    pub fn has_acpi(&self) -> bool {
        self.acpi
            .as_ref()
            .and_then(|acpi| acpi.enabled)
            .unwrap_or(true)
    }
}

pub(super) fn apply_defaults(features: &mut Features) {
    features.acpi.get_or_insert_with(FeatureState::default);
    let Features {
        acpi,
        apic,
        pvspinlock,
        ..
    } = features;
    for state in [acpi, pvspinlock].into_iter().flatten() {
        state.enabled.get_or_insert(true);
    }
    if let Some(apic) = apic {
        apic.enabled.get_or_insert(true);
    }
}

pub(super) fn validate(domain: &Domain, path: &FieldPath, causes: &mut Causes) {
    let Some(features) = &domain.features else {
        return;
    };
    let path = path.child("features");
    let apic = features.apic.as_ref().and_then(|apic| apic.enabled);
    let pvspinlock = features.pvspinlock.as_ref().and_then(|state| state.enabled);
    for (name, enabled) in [("apic", apic), ("pvspinlock", pvspinlock)] {
        if enabled == Some(false) {
            causes.not_supported(&path.child(name).child("enabled"), "cannot be false");
        }
    }
    if features
        .kvm
        .as_ref()
        .is_some_and(|kvm| kvm.hidden == Some(true))
    {
        causes.not_supported(&path.child("kvm.hidden"), "cannot be true");
    }
}

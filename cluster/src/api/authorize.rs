//! May this user do this? The API server's authorizer decides.

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::{Api, Client, api::PostParams};

use super::{GROUP, Target};
use crate::{front_proxy::User, status::Failure};

/// Passes if the user may do to the target what is asked.
pub(super) async fn check(
    client: &Client,
    user: &User,
    target: &Target<'_>,
) -> Result<(), Failure> {
    let wanted = ResourceAttributes {
        group: Some(GROUP.to_owned()),
        version: Some(target.version.to_owned()),
        namespace: Some(target.namespace.to_owned()),
        resource: Some(target.resource.to_owned()),
        subresource: Some(target.subresource.to_owned()),
        name: Some(target.name.to_owned()),
        verb: Some(target.verb.to_owned()),
        ..Default::default()
    };
    if is_allowed(client, user, wanted).await? {
        return Ok(());
    }
    Err(Failure::forbidden(format!(
        "{} \"{}\" is forbidden: user \"{}\" cannot {} resource \"{}/{}\" in API group \
         \"{GROUP}\" in the namespace \"{}\"",
        target.resource,
        target.name,
        user.name,
        target.verb,
        target.resource,
        target.subresource,
        target.namespace
    )))
}

/// Returns whether the user may do this.
pub(super) async fn is_allowed(
    client: &Client,
    user: &User,
    wanted: ResourceAttributes,
) -> Result<bool, Failure> {
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(user.name.clone()),
            groups: Some(user.groups.clone()),
            extra: Some(user.extra.clone()),
            resource_attributes: Some(wanted),
            ..Default::default()
        },
        ..Default::default()
    };
    let api: Api<SubjectAccessReview> = Api::all(client.clone());
    let answer = api
        .create(&PostParams::default(), &review)
        .await
        .map_err(|error| Failure::of_api_server(&error))?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

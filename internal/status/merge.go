package status

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

// localPrefix is the prefix of messages about the cluster of the hub.
const localPrefix = "on the hub (deploymentType Local): "

// MergeLocal returns one result per feature from the results for the member (remote) and for the cluster of the hub
// (local). A feature is Withdrawn only if both clusters have withdrawn it. Two Delivered results are merged to one,
// with the member's digest and the worse state. If only one result is Delivered, the other one (Failed, Skipped or
// Withdrawing) counts. If none is, the errors of both are joined. hasRemote and hasLocal return whether the profile has
// content of a feature for the member or the hub.
func MergeLocal(remote, local []FeatureResult, hasRemote, hasLocal func(libv1beta1.FeatureID) bool) []FeatureResult {
	merged := slices.DeleteFunc(slices.Clone(remote), func(r FeatureResult) bool { return r.Kind == Withdrawn && hasLocal(r.Feature) })
	for _, result := range local {
		if result.Kind == Withdrawn && hasRemote(result.Feature) {
			continue
		}
		result = withLocalPrefix(result)
		index := slices.IndexFunc(merged, func(r FeatureResult) bool { return r.Feature == result.Feature })
		switch {
		case index >= 0:
			merged[index] = mergeResults(merged[index], result)
		case !hasRemote(result.Feature):
			merged = append(merged, result)
		default:
			// The member's bundle is not built yet. So the feature keeps its status, unless the bundle of the hub has failed.
			if result = convertFailureReport(result); result.Kind != Delivered {
				merged = append(merged, result)
			}
		}
	}
	return merged
}

// withLocalPrefix returns a result with localPrefix in its messages.
func withLocalPrefix(r FeatureResult) FeatureResult {
	if r.Err != nil {
		r.Err = fmt.Errorf(localPrefix+"%w", r.Err)
	}
	if r.Report.Message != "" {
		r.Report.Message = localPrefix + r.Report.Message
	}
	return r
}

// mergeResults returns the result of a feature that has a result for the member (remote) and for the hub (local).
func mergeResults(remote, local FeatureResult) FeatureResult {
	switch {
	case remote.Kind == Delivered && local.Kind == Delivered:
		return mergeReports(remote, local)
	case local.Kind == Withdrawn:
		return remote
	case remote.Kind == Withdrawn:
		return local
	}
	remote, local = convertFailureReport(remote), convertFailureReport(local)
	switch {
	case local.Kind == Delivered:
		return remote
	case remote.Kind == Delivered:
		local.Releases = remote.Releases
		return local
	case remote.Err == nil:
		remote.Err, remote.Reason = local.Err, cmp.Or(remote.Reason, local.Reason)
	case local.Err != nil && !errors.Is(local.Err, remote.Err):
		remote.Err = fmt.Errorf("%w; %w", remote.Err, local.Err)
	}
	return remote
}

// convertFailureReport returns r as a Failed result if it is Delivered with the report of a failure, otherwise r.
func convertFailureReport(r FeatureResult) FeatureResult {
	if r.Kind != Delivered || !isFailureReport(r) {
		return r
	}
	return FeatureResult{
		Feature: r.Feature, Kind: Failed, Err: reportError(r.Report.Message), Reason: cmp.Or(r.Reason, ReasonApply),
		Status: libv1beta1.FeatureStatusFailed, Releases: r.Releases,
	}
}

// mergeReports returns the result for the member, with the worse state of both reports and its message. A failure is
// worse than any other state, and each other state is worse than Applied. If both are failures, or both are Applied,
// the messages are joined.
func mergeReports(remote, local FeatureResult) FeatureResult {
	merged := remote
	report := &merged.Report
	report.Kinds = slices.Concat(remote.Report.Kinds, local.Report.Kinds)
	slices.Sort(report.Kinds)
	report.Kinds = slices.Compact(report.Kinds)
	if local.Report.LastApplied.After(report.LastApplied) {
		report.LastApplied = local.Report.LastApplied
	}
	isRemoteApplied := remote.Report.State == bundle.StateApplied && remote.Report.Digest == remote.DesiredDigest
	localState := local.Report.State
	if local.Report.Digest != local.DesiredDigest {
		localState = bundle.StatePending
	}
	switch {
	case isFailureReport(local) && isFailureReport(remote):
		report.Message = joinMessages(report.Message, local.Report.Message)
	case isFailureReport(local):
		report.State, report.Digest, report.Message, merged.Reason = bundle.StateFailed, remote.DesiredDigest, local.Report.Message, local.Reason
	case isRemoteApplied && localState != bundle.StateApplied:
		report.State, report.Message = localState, local.Report.Message
	case isRemoteApplied:
		report.Message = joinMessages(report.Message, local.Report.Message)
	}
	return merged
}

// joinMessages joins two messages, each of which may be "".
func joinMessages(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + "; " + b
}

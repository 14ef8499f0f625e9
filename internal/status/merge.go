package status

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

// localPrefix begins messages about what is deployed to the cluster of the hub.
const localPrefix = "on the hub (deploymentType Local): "

// MergeLocal returns the results of the member's features, combined with those of the same features on the cluster of
// the hub. There is one result per feature, with the worse state of both, and with the digest of the member's bundle if
// there is one. isRemote and isLocal return whether the profile has content of a feature for the member or the hub.
func MergeLocal(remote, local []FeatureResult, isRemote, isLocal func(libv1beta1.FeatureID) bool) []FeatureResult {
	// What is withdrawn from one cluster is not removed while the other one has the feature.
	merged := slices.DeleteFunc(slices.Clone(remote), func(r FeatureResult) bool { return r.Kind == Withdrawn && isLocal(r.Feature) })
	for _, result := range local {
		if result.Kind == Withdrawn && isRemote(result.Feature) {
			continue
		}
		result = asLocal(result)
		index := slices.IndexFunc(merged, func(r FeatureResult) bool { return r.Feature == result.Feature })
		switch {
		case index >= 0:
			merged[index] = mergeResult(merged[index], result)
		case !isRemote(result.Feature):
			merged = append(merged, result)
		case result.Kind != Delivered:
			merged = append(merged, result)
		case result.Report.State == bundle.StateFailed:
			merged = append(merged, failedResult(result))
		}
		// Without a result for the member, its state and its digest do not change.
	}
	return merged
}

// asLocal returns a result with the cluster of the hub in its messages.
func asLocal(r FeatureResult) FeatureResult {
	if r.Err != nil {
		r.Err = fmt.Errorf(localPrefix+"%w", r.Err)
	}
	if r.Report.Message != "" {
		r.Report.Message = localPrefix + r.Report.Message
	}
	return r
}

// failedResult converts a result with a report about a failure to a result without a report.
func failedResult(r FeatureResult) FeatureResult {
	return FeatureResult{
		Feature: r.Feature, Kind: Failed, Err: reportError(r.Report.Message), Reason: cmp.Or(r.Reason, ReasonApply), Status: libv1beta1.FeatureStatusFailed,
	}
}

func mergeResult(remote, local FeatureResult) FeatureResult {
	switch {
	case remote.Kind == Delivered && local.Kind == Delivered:
		return mergeReports(remote, local)
	case remote.Kind == Delivered || remote.Kind == Withdrawn:
		local.Releases = remote.Releases
		return local
	case local.Kind == Withdrawn:
		return remote
	case local.Kind == Delivered && local.Report.State != bundle.StateFailed:
		return remote
	case local.Kind == Delivered:
		local = failedResult(local)
	}
	if remote.Err == nil {
		remote.Err, remote.Reason = local.Err, cmp.Or(remote.Reason, local.Reason)
	} else if local.Err != nil && !errors.Is(local.Err, remote.Err) {
		remote.Err = fmt.Errorf("%w; %w", remote.Err, local.Err)
	}
	return remote
}

// mergeReports returns the result for the member, whose report has the worse state of both.
func mergeReports(remote, local FeatureResult) FeatureResult {
	merged := remote
	report := &merged.Report
	report.Kinds = slices.Concat(remote.Report.Kinds, local.Report.Kinds)
	slices.Sort(report.Kinds)
	report.Kinds = slices.Compact(report.Kinds)
	if local.Report.LastApplied.After(report.LastApplied) {
		report.LastApplied = local.Report.LastApplied
	}
	state := local.Report.State
	if state != bundle.StateFailed && local.Report.Digest != local.DesiredDigest {
		state = bundle.StatePending
	}
	isApplied := remote.Report.State == bundle.StateApplied && remote.Report.Digest == remote.DesiredDigest
	switch {
	case state == bundle.StateFailed && remote.Report.State == bundle.StateFailed && remote.Report.Digest == remote.DesiredDigest:
		report.Message += "; " + local.Report.Message
	case state == bundle.StateFailed:
		report.State, report.Digest, report.Message, merged.Reason = state, remote.DesiredDigest, local.Report.Message, local.Reason
	case isApplied && state != bundle.StateApplied:
		report.State, report.Message = state, local.Report.Message
	case isApplied && report.Message == "":
		report.Message = local.Report.Message
	}
	return merged
}

package match

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// hashLength is the number of hex digits (40 bits) of the hashes that make names unique.
const hashLength = 10

// SummaryName returns the name of the ClusterSummary of a profile for m: <profile>-sveltos-<cluster>, with the prefix
// "p--" for a Profile. Profile a-sveltos-b for cluster c, and profile a for cluster b-sveltos-c, have the same name.
// Then the caller uses DistinctSummaryName for one of them. Names must not be parsed: the labels and the owner of a
// summary identify its profile and its member.
func SummaryName(profileKind, profile string, m fleet.Member) string {
	name := profile + "-" + strings.ToLower(string(m.Type)) + "-" + m.Name
	if profileKind == configv1beta1.ProfileKind {
		name = "p--" + name
	}
	if len(name) <= validation.DNS1123SubdomainMaxLength {
		return name
	}
	return withHash(name, name)
}

// DistinctSummaryName returns the name of the ClusterSummary of a profile for m if another summary has the SummaryName.
func DistinctSummaryName(profileKind, profile string, m fleet.Member) string {
	identity := strings.Join([]string{profileKind, profile, string(m.Type), m.Name}, "/")
	return withHash(SummaryName(profileKind, profile, m), identity)
}

// withHash adds the hash of identity to name, and shortens name if the result is too long. It removes a dot before the
// hash, since ".-" is invalid in the name of an object.
func withHash(name, identity string) string {
	name = name[:min(len(name), validation.DNS1123SubdomainMaxLength-hashLength-1)]
	return strings.TrimSuffix(name, ".") + "-" + hash(identity)
}

// LabelValue returns s as the value of a label. A longer value is shortened, and a hash makes it unique.
func LabelValue(s string) string {
	if len(s) <= validation.LabelValueMaxLength {
		return s
	}
	return s[:validation.LabelValueMaxLength-hashLength-1] + "-" + hash(s)
}

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])[:hashLength]
}

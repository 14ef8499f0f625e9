package match

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// hashLength is the number of hex digits (40 bits) that are added to a name to make it unique.
const hashLength = 10

// SummaryName returns the name of the ClusterSummary of one profile on m: <profile>-sveltos-<cluster>, with the prefix
// "p--" for a Profile. Two pairs can have the same name ("a-sveltos-b" on "c", "a" on "b-sveltos-c"), see
// DistinctSummaryName. Names must not be parsed: the labels and the owner identify the profile and the member.
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

// DistinctSummaryName returns the name of the ClusterSummary if the SummaryName of another pair is the same.
func DistinctSummaryName(profileKind, profile string, m fleet.Member) string {
	identity := strings.Join([]string{profileKind, profile, string(m.Type), m.Name}, "/")
	return withHash(SummaryName(profileKind, profile, m), identity)
}

// withHash adds the hash of identity to name, and shortens name if the result is too long. Then name must not end in a
// dot: ".-" is invalid in the name of an object.
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

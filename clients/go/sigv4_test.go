package penstock

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// Of AWS's test suite for Signature Version 4, and of the example in its documentation (iam).
func TestSignatureIsThatOfAWSsTestVectors(t *testing.T) {
	creds := credentials{AccessKeyID: "AKIDEXAMPLE", SecretAccessKey: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"}
	now := time.Date(2015, 8, 30, 12, 36, 0, 0, time.UTC)
	for _, one := range []struct{ method, address, contentType, service, signed, signature string }{
		{"GET", "https://example.amazonaws.com/", "", "service", "host;x-amz-date",
			"5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
		{"POST", "https://example.amazonaws.com/", "", "service", "host;x-amz-date",
			"5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"},
		{"GET", "https://iam.amazonaws.com/?Version=2010-05-08&Action=ListUsers",
			"application/x-www-form-urlencoded; charset=utf-8", "iam", "content-type;host;x-amz-date",
			"5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"},
	} {
		request, err := http.NewRequest(one.method, one.address, nil)
		if err != nil {
			t.Fatal(err)
		}
		if one.contentType != "" {
			request.Header.Set("Content-Type", one.contentType)
		}
		sign(request, nil, creds, "us-east-1", one.service, now)
		wanted := "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/" + one.service +
			"/aws4_request, SignedHeaders=" + one.signed + ", Signature=" + one.signature
		if found := request.Header.Get("Authorization"); found != wanted {
			t.Errorf("%s %s: %s", one.method, one.address, found)
		}
	}
}

func TestTheTokenOfTemporaryCredentialsIsSigned(t *testing.T) {
	request, err := http.NewRequest("POST", "http://127.0.0.1:4566", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	sign(request, []byte("{}"), credentials{"id", "secret", "token", time.Time{}}, "eu-west-1", "sqs", time.Now())
	if request.Header.Get("X-Amz-Security-Token") != "token" {
		t.Error("the token is not sent")
	}
	if found := request.Header.Get("Authorization"); !strings.Contains(found, "SignedHeaders=host;x-amz-date;x-amz-security-token,") {
		t.Error(found)
	}
}
